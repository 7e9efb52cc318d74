package dev.postbus;

import static dev.postbus.Bus.LONG;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.azure.core.http.rest.Response;
import com.azure.messaging.servicebus.administration.ServiceBusAdministrationAsyncClient;
import com.azure.messaging.servicebus.administration.ServiceBusAdministrationClientBuilder;
import com.azure.messaging.servicebus.administration.models.CreateQueueOptions;
import com.azure.messaging.servicebus.administration.models.CreateRuleOptions;
import com.azure.messaging.servicebus.administration.models.CreateSubscriptionOptions;
import com.azure.messaging.servicebus.administration.models.CreateTopicOptions;
import com.azure.messaging.servicebus.administration.models.FalseRuleFilter;
import com.azure.messaging.servicebus.administration.models.QueueProperties;
import com.azure.messaging.servicebus.administration.models.RuleProperties;
import com.azure.messaging.servicebus.administration.models.SqlRuleFilter;
import com.azure.messaging.servicebus.administration.models.SubscriptionProperties;
import com.azure.messaging.servicebus.administration.models.TopicProperties;
import org.junit.jupiter.api.Test;
import reactor.core.publisher.Flux;
import reactor.core.publisher.Mono;

/** The administration client that answers with a Mono or a Flux. */
class AsyncAdministrationTest {
    private final ServiceBusAdministrationAsyncClient admin =
        new ServiceBusAdministrationClientBuilder().connectionString(Bus.TLS).buildAsyncClient();

    private static <T> T got(Mono<T> answer) {
        return answer.block(LONG);
    }

    private static <T> T of(Mono<Response<T>> answer, int status) {
        Response<T> response = answer.block(LONG);
        assertEquals(status, response.getStatusCode());
        return response.getValue();
    }

    private static long count(Flux<?> all) {
        return all.count().block(LONG);
    }

    private static CreateSubscriptionOptions options() {
        return new CreateSubscriptionOptions().setMaxDeliveryCount(4);
    }

    private static CreateRuleOptions few() {
        return new CreateRuleOptions(new SqlRuleFilter("amount < 3"));
    }

    @Test
    void queues() {
        assertEquals("sdk-suite", got(admin.getNamespaceProperties()).getName());
        of(admin.getNamespacePropertiesWithResponse(), 200);
        got(admin.createQueue("a1"));
        got(admin.createQueue("a2", new CreateQueueOptions()));
        of(admin.createQueueWithResponse("a3", new CreateQueueOptions()), 201);
        assertTrue(got(admin.getQueueExists("a1")));
        assertFalse(got(admin.getQueueExists("a4")));
        assertTrue(of(admin.getQueueExistsWithResponse("a1"), 200));
        QueueProperties one = got(admin.getQueue("a1"));
        QueueProperties two = of(admin.getQueueWithResponse("a2"), 200);
        assertEquals(7, got(admin.updateQueue(one.setMaxDeliveryCount(7))).getMaxDeliveryCount());
        of(admin.updateQueueWithResponse(two.setMaxDeliveryCount(8)), 200);
        assertEquals(0, got(admin.getQueueRuntimeProperties("a1")).getTotalMessageCount());
        of(admin.getQueueRuntimePropertiesWithResponse("a1"), 200);
        assertTrue(count(admin.listQueues()) > 40);
        got(admin.deleteQueue("a1"));
        of(admin.deleteQueueWithResponse("a2"), 200);
        got(admin.deleteQueue("a3"));
    }

    @Test
    void topics() {
        got(admin.createTopic("b1"));
        got(admin.createTopic("b2", new CreateTopicOptions()));
        of(admin.createTopicWithResponse("b3", new CreateTopicOptions()), 201);
        assertTrue(got(admin.getTopicExists("b1")));
        assertTrue(of(admin.getTopicExistsWithResponse("b1"), 200));
        TopicProperties one = got(admin.getTopic("b1"));
        TopicProperties two = of(admin.getTopicWithResponse("b2"), 200);
        assertEquals("x", got(admin.updateTopic(one.setUserMetadata("x"))).getUserMetadata());
        of(admin.updateTopicWithResponse(two.setUserMetadata("y")), 200);
        assertEquals(0, got(admin.getTopicRuntimeProperties("b1")).getSubscriptionCount());
        of(admin.getTopicRuntimePropertiesWithResponse("b1"), 200);
        assertTrue(count(admin.listTopics()) >= 11);
        got(admin.deleteTopic("b1"));
        of(admin.deleteTopicWithResponse("b2"), 200);
        got(admin.deleteTopic("b3"));
    }

    @Test
    void subscriptionsAndRules() {
        got(admin.createTopic("c"));
        got(admin.createSubscription("c", "s1"));
        got(admin.createSubscription("c", "s2", options()));
        got(admin.createSubscription("c", "s3", "only", options(), few()));
        of(admin.createSubscriptionWithResponse("c", "s4", options()), 201);
        of(admin.createSubscriptionWithResponse("c", "s5", "only", options(), few()), 201);
        assertTrue(got(admin.getSubscriptionExists("c", "s1")));
        assertTrue(of(admin.getSubscriptionExistsWithResponse("c", "s1"), 200));
        SubscriptionProperties one = got(admin.getSubscription("c", "s1"));
        got(admin.updateSubscription(one.setMaxDeliveryCount(5)));
        SubscriptionProperties two = of(admin.getSubscriptionWithResponse("c", "s2"), 200);
        of(admin.updateSubscriptionWithResponse(two.setMaxDeliveryCount(5)), 200);
        assertEquals(5, count(admin.listSubscriptions("c")));
        got(admin.getSubscriptionRuntimeProperties("c", "s1"));
        of(admin.getSubscriptionRuntimePropertiesWithResponse("c", "s1"), 200);

        got(admin.createRule("c", "s1", "r1"));
        got(admin.createRule("c", "s1", "r2", few()));
        of(admin.createRuleWithResponse("c", "s1", "r3", few()), 201);
        RuleProperties rule = got(admin.getRule("c", "s1", "r2"));
        rule.setFilter(new FalseRuleFilter());
        got(admin.updateRule("c", "s1", rule));
        rule = of(admin.getRuleWithResponse("c", "s1", "r3"), 200);
        of(admin.updateRuleWithResponse("c", "s1", rule), 200);
        assertEquals(4, count(admin.listRules("c", "s1")));
        got(admin.deleteRule("c", "s1", "r1"));
        of(admin.deleteRuleWithResponse("c", "s1", "r2"), 200);
        got(admin.deleteSubscription("c", "s1"));
        of(admin.deleteSubscriptionWithResponse("c", "s2"), 200);
        got(admin.deleteTopic("c"));
    }
}
