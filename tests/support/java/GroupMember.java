import java.time.Duration;
import java.util.Collection;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;

/** A member of a group: BOOTSTRAP TOPIC GROUP PROTOCOL. Prints what it has and reads, commits what it gives up, and leaves at the
 *  end of its standard input. */
public class GroupMember {
    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        settings.put("group.id", args[2]);
        settings.put("group.protocol", args[3]);
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", "false");
        settings.put("key.deserializer", "org.apache.kafka.common.serialization.StringDeserializer");
        settings.put("value.deserializer", "org.apache.kafka.common.serialization.StringDeserializer");
        if (args[3].equals("classic")) {
            settings.put("session.timeout.ms", "60000");
            settings.put("heartbeat.interval.ms", "500");
        }
        AtomicBoolean leaving = new AtomicBoolean();
        Thread input = new Thread(() -> {
            try {
                while (System.in.read() >= 0) { }
            } catch (java.io.IOException gone) { }
            leaving.set(true);
        });
        input.setDaemon(true);
        input.start();
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings)) {
            consumer.subscribe(List.of(args[1]), new ConsumerRebalanceListener() {
                public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
                    if (!partitions.isEmpty()) consumer.commitSync();
                    has(consumer.assignment().size() - partitions.size());
                }
                public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
                    has(consumer.assignment().size());
                }
            });
            while (!leaving.get())
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(100)))
                    System.out.println("read " + record.value());
        }
        System.out.println("left");
        System.out.flush();
    }

    private static void has(int partitions) {
        System.out.println("has " + partitions);
        System.out.flush();
    }
}
