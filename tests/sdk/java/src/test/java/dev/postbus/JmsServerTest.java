package dev.postbus;

import static dev.postbus.JmsTest.KEY;
import static dev.postbus.JmsTest.LONG_MS;
import static dev.postbus.JmsTest.ROOT;
import static dev.postbus.JmsTest.factory;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import jakarta.jms.Connection;
import jakarta.jms.ConnectionConsumer;
import jakarta.jms.JMSException;
import jakarta.jms.Message;
import jakarta.jms.MessageProducer;
import jakarta.jms.Queue;
import jakarta.jms.ServerSession;
import jakarta.jms.ServerSessionPool;
import jakarta.jms.Session;
import jakarta.jms.Topic;
import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;

/** What of JMS an application server uses: it hands messages to sessions and threads of its own. */
class JmsServerTest {
    private final BlockingQueue<Message> came = new LinkedBlockingQueue<>();

    private ServerSessionPool poolOf(Connection connection) throws JMSException {
        Session session = connection.createSession();
        session.setMessageListener(came::add);
        ServerSession only =
            new ServerSession() {
                @Override
                public Session getSession() {
                    return session;
                }

                @Override
                public void start() {
                    new Thread(() -> session.run()).start();
                }
            };
        return () -> only;
    }

    @Test
    void messagesAreHandedToSessionsOfTheServer() throws Exception {
        try (Connection connection = factory().createConnection(ROOT, KEY)) {
            Session session = connection.createSession();
            Queue queue = session.createQueue("plain-24");
            ConnectionConsumer consumer =
                connection.createConnectionConsumer(queue, null, poolOf(connection), 1);
            connection.start();
            MessageProducer producer = session.createProducer(queue);
            for (String body : List.of("one", "two")) {
                producer.send(session.createTextMessage(body));
                Message message = came.poll(LONG_MS, TimeUnit.MILLISECONDS);
                assertEquals(body, message.getBody(String.class));
            }
            consumer.close();
        }
    }

    @Test
    void durableAndSharedOnesAreRefused() throws JMSException {
        try (Connection connection = factory().createConnection(ROOT, KEY)) {
            connection.setClientID("server");
            connection.start();
            Topic topic = connection.createSession().createTopic("topic-5");
            ServerSessionPool pool = poolOf(connection);
            for (Executable each :
                    List.<Executable>of(
                        () -> connection.createDurableConnectionConsumer(topic, "s", null, pool, 1),
                        () -> connection.createSharedConnectionConsumer(topic, "s", null, pool, 1),
                        () ->
                            connection.createSharedDurableConnectionConsumer(
                                topic, "s", null, pool, 1))) {
                assertThrows(JMSException.class, each);
            }
        }
    }
}
