package dev.postbus;

import com.azure.core.amqp.AmqpRetryOptions;
import com.azure.core.amqp.AmqpTransportType;
import com.azure.messaging.servicebus.ServiceBusClientBuilder;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import com.azure.messaging.servicebus.models.SubQueue;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;

/** The bus of this run and what tests share. */
final class Bus {
    static final Duration LONG = Duration.ofSeconds(20);
    static final Duration SOON = Duration.ofSeconds(1);
    static final String TLS = System.getenv("POSTBUS_TLS");
    static final String HOST = System.getenv("POSTBUS_HOST");

    private static final AmqpTransportType TRANSPORT =
        "websocket".equals(System.getenv("POSTBUS_TRANSPORT"))
            ? AmqpTransportType.AMQP_WEB_SOCKETS
            : AmqpTransportType.AMQP;

    private Bus() {}

    static ServiceBusClientBuilder builder() {
        return builder(TLS);
    }

    static ServiceBusClientBuilder builder(String connectionString) {
        return new ServiceBusClientBuilder()
            .connectionString(connectionString)
            .transportType(TRANSPORT)
            .retryOptions(retries(0, LONG));
    }

    static AmqpRetryOptions retries(int count, Duration timeout) {
        return new AmqpRetryOptions()
            .setMaxRetries(count)
            .setTryTimeout(timeout);
    }

    static ServiceBusReceiverClient dead(String queue) {
        return builder()
            .receiver()
            .queueName(queue)
            .subQueue(SubQueue.DEAD_LETTER_QUEUE)
            .disableAutoComplete()
            .buildClient();
    }

    static String keyed(String rule, String key) {
        return "Endpoint=sb://" + HOST + ";SharedAccessKeyName=" + rule + ";SharedAccessKey=" + key;
    }

    static ServiceBusSenderClient sender(String queue) {
        return builder().sender().queueName(queue).buildClient();
    }

    static ServiceBusReceiverClient receiver(String queue) {
        return builder().receiver().queueName(queue).disableAutoComplete().buildClient();
    }

    static void send(String queue, String... bodies) {
        try (ServiceBusSenderClient sender = sender(queue)) {
            for (String body : bodies) {
                sender.sendMessage(new ServiceBusMessage(body));
            }
        }
    }

    /** Receives exactly so many messages; one receive may return earlier with fewer. */
    static List<ServiceBusReceivedMessage> receive(ServiceBusReceiverClient from, int count) {
        List<ServiceBusReceivedMessage> found = new ArrayList<>();
        while (found.size() < count) {
            int before = found.size();
            from.receiveMessages(count - before, LONG).forEach(found::add);
            if (found.size() == before) {
                throw new AssertionError(before + " of " + count + " messages came");
            }
        }
        return found;
    }

    static ServiceBusReceivedMessage one(ServiceBusReceiverClient from) {
        return receive(from, 1).get(0);
    }

    static List<String> bodies(Iterable<ServiceBusReceivedMessage> messages) {
        List<String> bodies = new ArrayList<>();
        messages.forEach(each -> bodies.add(each.getBody().toString()));
        return bodies;
    }

    /** Lets time pass for messages, at once. */
    static void advance(String duration) {
        post(
            System.getenv("POSTBUS_CONTROL") + "/v1/clock/advance",
            "{\"duration\": \"" + duration + "\"}");
    }

    /** Asks the keeper of the bus: "restart?how=kill". */
    static void keeper(String request) {
        post(System.getenv("POSTBUS_KEEPER") + "/" + request, "");
    }

    private static void post(String url, String body) {
        HttpRequest request =
            HttpRequest.newBuilder(URI.create(url))
                .header("Content-Type", "application/json")
                .header("Authorization", "Bearer " + System.getenv("POSTBUS_CONTROL_TOKEN"))
                .POST(HttpRequest.BodyPublishers.ofString(body))
                .build();
        try {
            HttpResponse<String> answer =
                HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
            if (answer.statusCode() != 200) {
                throw new AssertionError(answer.body());
            }
        } catch (IOException | InterruptedException error) {
            throw new AssertionError(error);
        }
    }
}
