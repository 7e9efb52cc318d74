package dev.postbus;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.azure.core.exception.ClientAuthenticationException;
import com.azure.core.exception.HttpResponseException;
import com.azure.core.exception.ResourceExistsException;
import com.azure.core.exception.ResourceNotFoundException;
import com.azure.core.http.rest.Response;
import com.azure.core.util.Context;
import com.azure.messaging.servicebus.administration.ServiceBusAdministrationClient;
import com.azure.messaging.servicebus.administration.ServiceBusAdministrationClientBuilder;
import com.azure.messaging.servicebus.administration.models.CorrelationRuleFilter;
import com.azure.messaging.servicebus.administration.models.CreateQueueOptions;
import com.azure.messaging.servicebus.administration.models.CreateRuleOptions;
import com.azure.messaging.servicebus.administration.models.CreateSubscriptionOptions;
import com.azure.messaging.servicebus.administration.models.CreateTopicOptions;
import com.azure.messaging.servicebus.administration.models.EntityStatus;
import com.azure.messaging.servicebus.administration.models.FalseRuleFilter;
import com.azure.messaging.servicebus.administration.models.MessagingSku;
import com.azure.messaging.servicebus.administration.models.NamespaceProperties;
import com.azure.messaging.servicebus.administration.models.QueueProperties;
import com.azure.messaging.servicebus.administration.models.QueueRuntimeProperties;
import com.azure.messaging.servicebus.administration.models.RuleProperties;
import com.azure.messaging.servicebus.administration.models.SqlRuleAction;
import com.azure.messaging.servicebus.administration.models.SqlRuleFilter;
import com.azure.messaging.servicebus.administration.models.SubscriptionProperties;
import com.azure.messaging.servicebus.administration.models.TopicProperties;
import java.time.Duration;
import org.junit.jupiter.api.Test;

/** The administration client. */
class AdministrationTest {
    private final ServiceBusAdministrationClient admin =
        new ServiceBusAdministrationClientBuilder().connectionString(Bus.TLS).buildClient();

    @Test
    void aQueueFromItsCreationToItsEnd() {
        assertEquals("sdk-suite", admin.getNamespaceProperties().getName());
        assertFalse(admin.getQueueExists("made"));
        CreateQueueOptions wanted =
            new CreateQueueOptions()
                .setLockDuration(Duration.ofSeconds(45))
                .setMaxDeliveryCount(3)
                .setSessionRequired(true)
                .setDefaultMessageTimeToLive(Duration.ofDays(7))
                .setUserMetadata("mine & yours");
        admin.createQueue("made", wanted);
        QueueProperties got = admin.getQueue("made");
        assertEquals(Duration.ofSeconds(45), got.getLockDuration());
        assertEquals(3, got.getMaxDeliveryCount());
        assertTrue(got.isSessionRequired());
        assertEquals("mine & yours", got.getUserMetadata());
        assertThrows(ResourceExistsException.class, () -> admin.createQueue("made"));
        assertEquals(9, admin.updateQueue(got.setMaxDeliveryCount(9)).getMaxDeliveryCount());
        assertTrue(admin.listQueues().stream().anyMatch(each -> each.getName().equals("made")));
        admin.deleteQueue("made");
        assertThrows(ResourceNotFoundException.class, () -> admin.getQueue("made"));
    }

    @Test
    void countsOfAQueue() {
        Bus.send("plain-20", "a", "b");
        assertEquals(2, admin.getQueueRuntimeProperties("plain-20").getActiveMessageCount());
    }

    @Test
    void topicsSubscriptionsAndRules() {
        admin.createTopic("events");
        TopicProperties topic = admin.getTopic("events");
        assertEquals("new", admin.updateTopic(topic.setUserMetadata("new")).getUserMetadata());
        assertTrue(admin.getTopicExists("events"));
        assertTrue(admin.listTopics().stream().anyMatch(each -> each.getName().equals("events")));
        admin.createSubscription("events", "all");
        SubscriptionProperties all = admin.getSubscription("events", "all");
        assertEquals(
            6, admin.updateSubscription(all.setMaxDeliveryCount(6)).getMaxDeliveryCount());
        assertTrue(admin.getSubscriptionExists("events", "all"));
        assertEquals(1, admin.listSubscriptions("events").stream().count());
        assertEquals(1, admin.getTopicRuntimeProperties("events").getSubscriptionCount());
        assertEquals(
            0, admin.getSubscriptionRuntimeProperties("events", "all").getActiveMessageCount());

        CreateRuleOptions big =
            new CreateRuleOptions(new SqlRuleFilter("amount > 10"))
                .setAction(new SqlRuleAction("SET size = 'L'"));
        admin.createRule("events", "big", "all", big);
        CorrelationRuleFilter wanted = new CorrelationRuleFilter().setLabel("order");
        wanted.getProperties().put("region", "eu");
        admin.createRule("events", "exact", "all", new CreateRuleOptions(wanted));
        RuleProperties exact = admin.getRule("events", "all", "exact");
        CorrelationRuleFilter filter = (CorrelationRuleFilter) exact.getFilter();
        assertEquals("order", filter.getLabel());
        assertEquals("eu", filter.getProperties().get("region"));
        exact.setFilter(new SqlRuleFilter("amount > 20"));
        admin.updateRule("events", "all", exact);
        assertEquals(3, admin.listRules("events", "all").stream().count());
        admin.deleteRule("events", "all", "big");
        admin.deleteSubscription("events", "all");
        admin.deleteTopic("events");
        assertFalse(admin.getTopicExists("events"));
    }

    private static <T> T of(Response<T> response, int status) {
        assertEquals(status, response.getStatusCode());
        return response.getValue();
    }

    @Test
    void queuesWithTheirResponses() {
        Context none = Context.NONE;
        NamespaceProperties namespace = of(admin.getNamespacePropertiesWithResponse(none), 200);
        assertEquals(MessagingSku.STANDARD, namespace.getMessagingSku());
        QueueProperties made =
            of(admin.createQueueWithResponse("made-2", new CreateQueueOptions(), none), 201);
        assertEquals("made-2", made.getName());
        assertTrue(of(admin.getQueueExistsWithResponse("made-2", none), 200));
        assertFalse(admin.getQueueExistsWithResponse("made-3", none).getValue());
        QueueProperties got = of(admin.getQueueWithResponse("made-2", none), 200);
        got.setStatus(EntityStatus.SEND_DISABLED);
        got = of(admin.updateQueueWithResponse(got, none), 200);
        assertEquals(EntityStatus.SEND_DISABLED, got.getStatus());
        QueueRuntimeProperties counts =
            of(admin.getQueueRuntimePropertiesWithResponse("made-2", none), 200);
        assertEquals(0, counts.getTotalMessageCount());
        assertTrue(admin.listQueues(none).stream().count() > 40);
        of(admin.deleteQueueWithResponse("made-2", none), 200);
        assertEquals(10, admin.createQueue("made-2").getMaxDeliveryCount());
        admin.deleteQueue("made-2");
    }

    @Test
    void topicsWithTheirResponses() {
        Context none = Context.NONE;
        of(admin.createTopicWithResponse("t", new CreateTopicOptions(), none), 201);
        admin.createTopic("u", new CreateTopicOptions().setUserMetadata("u"));
        assertTrue(of(admin.getTopicExistsWithResponse("t", none), 200));
        TopicProperties topic = of(admin.getTopicWithResponse("t", none), 200);
        of(admin.updateTopicWithResponse(topic.setUserMetadata("x"), none), 200);
        assertTrue(admin.listTopics(none).stream().count() >= 10);
        of(admin.createSubscriptionWithResponse("t", "s", options(), none), 201);
        of(
            admin.createSubscriptionWithResponse("t", "r", "only", options(), few(), none),
            201);
        admin.createSubscription("t", "s2", options());
        admin.createSubscription("t", "r2", "only", options(), few());
        assertEquals("only", admin.listRules("t", "r2").iterator().next().getName());
        assertTrue(of(admin.getSubscriptionExistsWithResponse("t", "s", none), 200));
        SubscriptionProperties got = of(admin.getSubscriptionWithResponse("t", "s", none), 200);
        of(admin.updateSubscriptionWithResponse(got.setUserMetadata("x"), none), 200);
        assertEquals(4, admin.listSubscriptions("t", none).stream().count());
        of(admin.getSubscriptionRuntimePropertiesWithResponse("t", "s", none), 200);
        assertEquals(
            4, of(admin.getTopicRuntimePropertiesWithResponse("t", none), 200)
                .getSubscriptionCount());
        admin.createRule("t", "s", "plain"); // the order of the SDK
        of(admin.createRuleWithResponse("t", "s", "few", few(), none), 201);
        RuleProperties rule = of(admin.getRuleWithResponse("t", "s", "few", none), 200);
        rule.setFilter(new FalseRuleFilter());
        of(admin.updateRuleWithResponse("t", "s", rule, none), 200);
        assertEquals(3, admin.listRules("t", "s", none).stream().count());
        of(admin.deleteRuleWithResponse("t", "s", "few", none), 200);
        of(admin.deleteSubscriptionWithResponse("t", "s", none), 200);
        of(admin.deleteTopicWithResponse("t", none), 200);
        admin.deleteTopic("u");
    }

    private static CreateSubscriptionOptions options() {
        return new CreateSubscriptionOptions().setMaxDeliveryCount(4);
    }

    private static CreateRuleOptions few() {
        return new CreateRuleOptions(new SqlRuleFilter("amount < 3"));
    }

    @Test
    void whatIsRefused() {
        assertThrows(ResourceNotFoundException.class, () -> admin.deleteQueue("nowhere"));
        assertThrows(
            HttpResponseException.class,
            () -> admin.createQueue("bad", new CreateQueueOptions().setMaxDeliveryCount(-1)));
        ServiceBusAdministrationClient limited =
            new ServiceBusAdministrationClientBuilder()
                .connectionString(Bus.keyed("listener", "l1sten/+l1sten/+l1sten/+"))
                .buildClient();
        assertThrows(ClientAuthenticationException.class, () -> limited.createQueue("bad"));
    }
}
