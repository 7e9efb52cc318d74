package dev.postbus;

import static net.bytebuddy.matcher.ElementMatchers.isPublic;

import com.azure.messaging.servicebus.ServiceBusErrorContext;
import com.azure.messaging.servicebus.ServiceBusMessageBatch;
import com.azure.messaging.servicebus.ServiceBusProcessorClient;
import com.azure.messaging.servicebus.ServiceBusReceivedMessageContext;
import com.azure.messaging.servicebus.ServiceBusReceiverAsyncClient;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusRuleManagerAsyncClient;
import com.azure.messaging.servicebus.ServiceBusRuleManagerClient;
import com.azure.messaging.servicebus.ServiceBusSenderAsyncClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import com.azure.messaging.servicebus.ServiceBusSessionReceiverAsyncClient;
import com.azure.messaging.servicebus.ServiceBusSessionReceiverClient;
import com.azure.messaging.servicebus.administration.ServiceBusAdministrationAsyncClient;
import com.azure.messaging.servicebus.administration.ServiceBusAdministrationClient;
import jakarta.jms.Connection;
import jakarta.jms.ConnectionFactory;
import jakarta.jms.JMSConsumer;
import jakarta.jms.JMSContext;
import jakarta.jms.JMSProducer;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.QueueBrowser;
import jakarta.jms.Session;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.lang.instrument.Instrumentation;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.stream.Collectors;
import net.bytebuddy.ByteBuddy;
import net.bytebuddy.agent.ByteBuddyAgent;
import net.bytebuddy.asm.Advice;
import net.bytebuddy.dynamic.loading.ClassReloadingStrategy;
import net.bytebuddy.implementation.bytecode.assign.Assigner;
import org.junit.platform.launcher.LauncherSession;
import org.junit.platform.launcher.LauncherSessionListener;
import reactor.core.publisher.Flux;
import reactor.core.publisher.Mono;

/**
 * Notes which public methods of the clients the tests called and which of them succeeded.
 *
 * <p>Only calls made by a class of this package count, not what clients call among themselves. What
 * returns a Mono, a Flux or a lazy list has worked when that gave a value or ended well. Each run
 * writes its files into POSTBUS_COVERAGE: {"methods": {"Class.method(Type)": {"tried": n, "worked":
 * n}}}
 */
public final class Coverage implements LauncherSessionListener {
    static final List<Class<?>> AZURE =
        List.of(
            ServiceBusSenderClient.class,
            ServiceBusSenderAsyncClient.class,
            ServiceBusReceiverClient.class,
            ServiceBusReceiverAsyncClient.class,
            ServiceBusSessionReceiverClient.class,
            ServiceBusSessionReceiverAsyncClient.class,
            ServiceBusProcessorClient.class,
            ServiceBusReceivedMessageContext.class,
            ServiceBusErrorContext.class,
            ServiceBusRuleManagerClient.class,
            ServiceBusRuleManagerAsyncClient.class,
            ServiceBusMessageBatch.class,
            ServiceBusAdministrationClient.class,
            ServiceBusAdministrationAsyncClient.class);

    /** Interfaces of JMS and the classes of Qpid behind them; messages only hold values. */
    static final Map<Class<?>, String> JMS =
        Map.of(
            ConnectionFactory.class, "JmsConnectionFactory",
            Connection.class, "JmsConnection",
            Session.class, "JmsSession",
            MessageProducer.class, "JmsMessageProducer",
            MessageConsumer.class, "JmsMessageConsumer",
            QueueBrowser.class, "JmsQueueBrowser",
            JMSContext.class, "JmsContext",
            JMSProducer.class, "JmsProducer",
            JMSConsumer.class, "JmsConsumer");

    private static final StackWalker STACK = StackWalker.getInstance();
    private static final Map<String, int[]> AZURE_CALLS = new TreeMap<>();
    private static final Map<String, int[]> JMS_CALLS = new TreeMap<>();

    /** "Class.method(Types)" of the class that was changed -> its count. */
    private static final Map<String, int[]> COUNTS = new TreeMap<>();

    @Override
    public void launcherSessionOpened(LauncherSession session) {
        Instrumentation agent = ByteBuddyAgent.install();
        ClassReloadingStrategy reload = ClassReloadingStrategy.of(agent);
        for (Class<?> each : AZURE) {
            for (Method method : each.getDeclaredMethods()) {
                if (Modifier.isPublic(method.getModifiers())) {
                    count(each, method, AZURE_CALLS, each.getSimpleName());
                }
            }
            change(each, reload);
        }
        JMS.forEach(
            (said, name) -> {
                try {
                    Class<?> behind = Class.forName("org.apache.qpid.jms." + name);
                    for (Method method : said.getMethods()) {
                        count(behind, method, JMS_CALLS, said.getSimpleName());
                    }
                    change(behind, reload);
                } catch (ClassNotFoundException error) {
                    throw new AssertionError(error);
                }
            });
    }

    private static void count(
            Class<?> behind, Method method, Map<String, int[]> calls, String client) {
        String said = method.getName() + types(method);
        int[] both = calls.computeIfAbsent(client + "." + said, name -> new int[2]);
        COUNTS.put(behind.getSimpleName() + "." + said, both);
    }

    private static String types(Method method) {
        return Arrays.stream(method.getParameterTypes())
            .map(Class::getSimpleName)
            .collect(Collectors.joining(", ", "(", ")"));
    }

    private static void change(Class<?> each, ClassReloadingStrategy reload) {
        Set<String> names =
            Arrays.stream(each.getMethods()).map(Method::getName).collect(Collectors.toSet());
        new ByteBuddy()
            .redefine(each)
            .visit(
                Advice.to(Counted.class)
                    .on(isPublic().and(method -> names.contains(method.getName()))))
            .make()
            .load(each.getClassLoader(), reload);
    }

    /** Returns the count of a call by a test; null for what clients call among themselves. */
    public static int[] enter(Method method) {
        String caller =
            STACK.walk(frames -> frames.skip(2).findFirst().orElseThrow()).getClassName();
        if (!caller.startsWith("dev.postbus.")) {
            return null;
        }
        String in = method.getDeclaringClass().getSimpleName();
        int[] both = COUNTS.get(in + "." + method.getName() + types(method));
        if (both != null) {
            add(both, 0);
        }
        return both;
    }

    public static Object leave(Method method, int[] both, Object result, Throwable thrown) {
        if (both == null || thrown != null) {
            return result;
        }
        if (result instanceof Mono<?> mono) {
            return mono.doOnSuccess(value -> add(both, 1));
        }
        // Lists by page are of a class of their own, and the tests look what is in them.
        if (result instanceof Flux<?> flux && !result.getClass().getName().contains("Paged")) {
            return flux.doOnNext(value -> add(both, 1)).doOnComplete(() -> add(both, 1));
        }
        // Other lists have a type of their own and begin at once.
        if (method.getReturnType() == Iterable.class && result instanceof Iterable<?> lazy) {
            return (Iterable<Object>) () -> read(both, lazy);
        }
        add(both, 1);
        return result;
    }

    @SuppressWarnings("unchecked")
    private static Iterator<Object> read(int[] both, Iterable<?> lazy) {
        Iterator<Object> values = (Iterator<Object>) lazy.iterator();
        values.hasNext();
        add(both, 1);
        return values;
    }

    /** Returns how often a method of the official SDK succeeded. */
    static int worked(String method) {
        int[] both = AZURE_CALLS.get(method);
        synchronized (both) {
            return both[1];
        }
    }

    private static void add(int[] both, int at) {
        synchronized (both) {
            both[at] += 1;
        }
    }

    /** Laid around each public method. */
    public static final class Counted {
        private Counted() {}

        @Advice.OnMethodEnter
        static int[] enter(@Advice.Origin Method method) {
            return Coverage.enter(method);
        }

        @Advice.OnMethodExit(onThrowable = Throwable.class)
        static void leave(
                @Advice.Origin Method method,
                @Advice.Enter int[] both,
                @Advice.Return(readOnly = false, typing = Assigner.Typing.DYNAMIC) Object result,
                @Advice.Thrown Throwable thrown) {
            result = Coverage.leave(method, both, result, thrown);
        }
    }

    @Override
    public void launcherSessionClosed(LauncherSession session) {
        String folder = System.getenv("POSTBUS_COVERAGE");
        if (folder != null) {
            write(Path.of(folder, "azure"), AZURE_CALLS);
            write(Path.of(folder, "jms"), JMS_CALLS);
        }
    }

    private static void write(Path folder, Map<String, int[]> calls) {
        String methods =
            calls.entrySet().stream()
                .map(
                    each ->
                        "\"%s\": {\"tried\": %d, \"worked\": %d}"
                            .formatted(each.getKey(), each.getValue()[0], each.getValue()[1]))
                .collect(Collectors.joining(",\n", "{\"methods\": {\n", "\n}}\n"));
        try {
            Files.createDirectories(folder);
            Files.writeString(folder.resolve(ProcessHandle.current().pid() + ".json"), methods);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }
}
