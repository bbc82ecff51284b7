import java.time.Duration;
import java.util.Arrays;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.KGroupedStream;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.processor.StateRestoreListener;

/** A program of Kafka Streams: APPLICATION BOOTSTRAP STATE_DIRECTORY INPUT COUNTS WINDOWS [KEY=VALUE ...]. It counts the words of
 *  INPUT's values: each count goes to COUNTS, the counts of windows of a minute to WINDOWS. Prints "state NAME", "restored STORE
 *  RECORDS" and "failed WHY", and leaves at the end of its standard input. */
public class WordCount {
    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put("application.id", args[0]);
        settings.put("bootstrap.servers", args[1]);
        settings.put("state.dir", args[2]);
        settings.put("default.key.serde", Serdes.String().getClass());
        settings.put("default.value.serde", Serdes.String().getClass());
        settings.put("statestore.cache.max.bytes", "0"); // so that each count is written
        settings.put("auto.offset.reset", "earliest");
        for (String each : Arrays.copyOfRange(args, 6, args.length)) {
            String[] parts = each.split("=", 2);
            settings.put(parts[0], parts[1]);
        }
        StreamsBuilder builder = new StreamsBuilder();
        KStream<String, String> lines = builder.stream(args[3]);
        KGroupedStream<String, String> words = lines
            .flatMapValues(line -> Arrays.asList(line.split(" ")))
            .groupBy((key, word) -> word, Grouped.as("words"));
        words.count(Materialized.as("counts")).toStream().mapValues(String::valueOf).to(args[4]);
        words.windowedBy(TimeWindows.ofSizeAndGrace(Duration.ofMinutes(1), Duration.ofHours(1)))
            .count(Materialized.as("windows"))
            .toStream((window, count) -> window.key() + "@" + window.window().start())
            .mapValues(String::valueOf)
            .to(args[5]);
        KafkaStreams streams = new KafkaStreams(builder.build(settings), settings);
        streams.setStateListener((now, before) -> say("state " + now));
        streams.setUncaughtExceptionHandler(why -> {
            why.printStackTrace();
            say("failed " + why);
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        streams.setGlobalStateRestoreListener(new StateRestoreListener() {
            public void onRestoreStart(TopicPartition partition, String store, long first, long end) { }
            public void onBatchRestored(TopicPartition partition, String store, long last, long records) { }
            public void onRestoreEnd(TopicPartition partition, String store, long records) {
                say("restored " + store + " " + records);
            }
        });
        streams.start();
        while (System.in.read() >= 0) { }
        streams.close(Duration.ofSeconds(30));
        say("left");
    }

    private static synchronized void say(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
