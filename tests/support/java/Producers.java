import java.util.Properties;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.errors.TimeoutException;

/** A producer that notes what becomes of what it sends: BOOTSTRAP TOPIC PARTITIONS TIMEOUT_MS [TRANSACTIONAL_ID].
 *
 *  Without a transactional id: a record every 10 ms, to one partition after the other. Prints "NUMBER SENT_NS ANSWERED_NS OFFSET",
 *  with the error in place of the offset if there is one. With one: transactions that put "txn-NUMBER" into every partition; one
 *  in four is aborted. Prints "NUMBER ok|failed|unknown". Ends at the end of its standard input. */
public class Producers {
    private interface Step { void run(); }

    private static final AtomicBoolean leaving = new AtomicBoolean();
    private static final Properties settings = new Properties();
    private static String topic;
    private static int partitions;
    private static long timeoutMs;

    public static void main(String[] args) throws Exception {
        topic = args[1];
        partitions = Integer.parseInt(args[2]);
        timeoutMs = Long.parseLong(args[3]);
        settings.put("bootstrap.servers", args[0]);
        settings.put("delivery.timeout.ms", args[3]);
        settings.put("key.serializer", "org.apache.kafka.common.serialization.StringSerializer");
        settings.put("value.serializer", "org.apache.kafka.common.serialization.StringSerializer");
        Thread input = new Thread(() -> {
            try {
                while (System.in.read() >= 0) { }
            } catch (java.io.IOException gone) { }
            leaving.set(true);
        });
        input.setDaemon(true);
        input.start();
        if (args.length > 4) {
            settings.put("transactional.id", args[4]);
            transacted();
        } else {
            plain();
        }
    }

    private static void plain() throws InterruptedException {
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings)) {
            for (int sent = 0; !leaving.get(); sent++) {
                int number = sent;
                long sentNs = System.nanoTime();
                producer.send(new ProducerRecord<>(topic, number % partitions, null, "" + number), (where, error) ->
                    say(number + " " + sentNs + " " + System.nanoTime() + " " + (error == null ? where.offset() : error)));
                Thread.sleep(10);
            }
        }
    }

    private static void transacted() {
        KafkaProducer<String, String> producer = made();
        for (int number = 0; !leaving.get(); number++) {
            String outcome = one(producer, number);
            say(number + " " + outcome);
            if (outcome.equals("unknown")) {
                producer.close();
                producer = made();
            }
        }
        producer.close();
    }

    private static KafkaProducer<String, String> made() {
        KafkaProducer<String, String> producer = new KafkaProducer<>(settings);
        patiently(producer::initTransactions);
        return producer;
    }

    private static String one(KafkaProducer<String, String> producer, int number) {
        try {
            producer.beginTransaction();
            for (int partition = 0; partition < partitions; partition++)
                producer.send(new ProducerRecord<>(topic, partition, null, "txn-" + number));
            if (number % 4 != 3) {
                patiently(producer::commitTransaction);
                return "ok";
            }
        } catch (KafkaException refused) {
            System.err.println("transaction " + number + ": " + refused);
        }
        try {
            patiently(producer::abortTransaction);
            return "failed";
        } catch (KafkaException fatal) {
            System.err.println("transaction " + number + " is not aborted: " + fatal);
            return "unknown";
        }
    }

    private static void patiently(Step step) {
        long deadlineNs = System.nanoTime() + timeoutMs * 1_000_000;
        while (true) {
            try {
                step.run();
                return;
            } catch (TimeoutException late) {
                if (System.nanoTime() > deadlineNs) throw late;
            }
        }
    }

    private static synchronized void say(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
