package dev.postbus;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.azure.core.exception.ResourceExistsException;
import com.azure.core.exception.ResourceNotFoundException;
import com.azure.messaging.servicebus.administration.ServiceBusAdministrationClient;
import com.azure.messaging.servicebus.administration.ServiceBusAdministrationClientBuilder;
import com.azure.messaging.servicebus.administration.models.CorrelationRuleFilter;
import com.azure.messaging.servicebus.administration.models.CreateQueueOptions;
import com.azure.messaging.servicebus.administration.models.CreateRuleOptions;
import com.azure.messaging.servicebus.administration.models.QueueProperties;
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
}
