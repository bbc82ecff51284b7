// A smoke client, written from proto/, docs/protocol.md and docs/format.md alone.
//
// It asks a broker what it speaks, finds a topic's leader, produces one batch of format 1 after it was refused for a leader
// epoch that it made up, and fetches the batch back. It prints what it has seen as one JSON object.

import com.google.flatbuffers.FlatBufferBuilder;
import com.google.flatbuffers.Table;
import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.BlockingClientCall;
import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.zip.CRC32C;
import raftlog.v1.*;
import raftlog.v1.Error;

public final class Client {
  static final int HEADER_BYTES = 64;

  record Place(long position, long length) {}

  public static void main(String[] arguments) throws Exception {
    ManagedChannel channel = ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
    try {
      System.out.println(run(channel, arguments[1]));
    } finally {
      channel.shutdownNow().awaitTermination(10, TimeUnit.SECONDS);
    }
  }

  static String run(ManagedChannel channel, String topic) throws Exception {
    MetadataGrpc.MetadataBlockingV2Stub metadata =
        MetadataGrpc.newBlockingV2Stub(channel).withDeadlineAfter(60, TimeUnit.SECONDS);
    LogGrpc.LogBlockingV2Stub log = LogGrpc.newBlockingV2Stub(channel).withDeadlineAfter(60, TimeUnit.SECONDS);
    ApiVersionsResponse versions =
        metadata.apiVersions(ApiVersionsRequest.newBuilder().setClientSoftwareName("smoke-java").build());
    if (!versions.getMethodsList().contains("/raftlog.v1.Log/Produce") || !versions.getRecordFormatsList().contains(1)) {
      throw new IllegalStateException("the broker does not speak what this client does: " + versions);
    }

    // A stream whose first request is not `open` ends with a status that carries an Error.
    List<String> refusals = new ArrayList<>();
    BlockingClientCall<FetchRequest, FetchResponse> refused = log.fetch();
    refused.write(FetchRequest.newBuilder().setCredit(GrantCredit.newBuilder().setBytes(1)).build());
    try {
      refused.read();
      throw new IllegalStateException("a fetch session without an open was not refused");
    } catch (io.grpc.StatusException | StatusRuntimeException ended) {
      for (Any detail : StatusProto.fromThrowable(ended).getDetailsList()) {
        refusals.add(named(detail.unpack(Error.class).getCode()));
      }
    }

    List<byte[]> values = new ArrayList<>();
    for (String value : List.of("hello", "", "from Java")) {
      values.add(value.getBytes(StandardCharsets.UTF_8));
    }
    byte[] batch = encode(values, System.currentTimeMillis());
    int epoch = 1_000_000; // made up: refused, and the table says what to do
    for (int attempt = 0; ; attempt++) {
      TopicInfo info = describe(metadata, topic);
      if (attempt > 0) {
        epoch = info.getPartitions(0).getLeaderEpoch();
      }
      ProduceResult result = produce(log, info.getTopicId(), epoch, batch);
      ErrorCode code = result.getError().getCode();
      if (code == ErrorCode.NONE) {
        List<String> read = decode(fetch(log, info.getTopicId(), epoch, result.getBaseOffset()), result.getBaseOffset());
        return "{\"base_offset\": " + result.getBaseOffset() + ", \"values\": " + json(read) + ", \"refusals\": "
            + json(refusals) + "}";
      }
      refusals.add(named(code));
      boolean again = retryOf(code) == Retry.RETRY_SAME || retryOf(code) == Retry.RETRY_REFRESH;
      if (!again || attempt > 20) {
        throw new IllegalStateException(code + " is final here: " + result.getError().getMessage());
      }
      Thread.sleep(Math.min(attempt, 10) * 100L);
    }
  }

  static String json(List<String> values) { // of values without a character that JSON escapes
    return values.isEmpty() ? "[]" : "[\"" + String.join("\", \"", values) + "\"]";
  }

  static String named(ErrorCode code) {
    return code.name() + " " + retryOf(code).name();
  }

  /** Returns the option of an error code's value; an unknown code is final. */
  static Retry retryOf(ErrorCode code) {
    return code == ErrorCode.UNRECOGNIZED
        ? Retry.RETRY_FINAL
        : code.getValueDescriptor().getOptions().getExtension(Options.retry);
  }

  static TopicInfo describe(MetadataGrpc.MetadataBlockingV2Stub metadata, String topic) throws Exception {
    for (int attempt = 0; ; attempt++) {
      TopicInfo info = metadata.get(MetadataRequest.newBuilder().addTopics(topic).build()).getTopics(0);
      ErrorCode code = info.getError().getCode();
      if (code == ErrorCode.NONE) {
        return info;
      }
      if (retryOf(code) == Retry.RETRY_FINAL || attempt > 20) {
        throw new IllegalStateException(code + ": " + info.getError().getMessage());
      }
      Thread.sleep(100);
    }
  }

  static ProduceResult produce(LogGrpc.LogBlockingV2Stub log, ByteString topicId, int epoch, byte[] batch)
      throws Exception {
    BlockingClientCall<ProduceRequest, ProduceResponse> stream = log.produce();
    stream.write(
        ProduceRequest.newBuilder()
            .setCorrelationId(7)
            .setAcks(Acks.ALL)
            .addPartitions(
                ProducePartition.newBuilder()
                    .setTopicId(topicId)
                    .setLeaderEpoch(epoch)
                    .setRecords(ByteString.copyFrom(batch)))
            .build());
    ProduceResponse answer = stream.read();
    stream.halfClose();
    if (answer == null || answer.getCorrelationId() != 7 || answer.getResultsCount() != 1) {
      throw new IllegalStateException("an answer to another request: " + answer);
    }
    return answer.getResults(0);
  }

  static byte[] fetch(LogGrpc.LogBlockingV2Stub log, ByteString topicId, int epoch, long offset) throws Exception {
    BlockingClientCall<FetchRequest, FetchResponse> stream = log.fetch();
    FetchPartition part =
        FetchPartition.newBuilder()
            .setSubscriptionId(1)
            .setTopicId(topicId)
            .setOffset(offset)
            .setLeaderEpoch(epoch)
            .build();
    stream.write(FetchRequest.newBuilder().setOpen(OpenFetchSession.newBuilder().setCreditBytes(1 << 20)).build());
    stream.write(FetchRequest.newBuilder().setSubscribe(Subscribe.newBuilder().addPartitions(part)).build());
    try {
      while (true) {
        for (FetchFrame frame : stream.read().getFramesList()) {
          if (frame.getError().getCode() != ErrorCode.NONE) {
            throw new IllegalStateException(frame.getError().getCode() + ": " + frame.getError().getMessage());
          }
          if (!frame.getRecords().isEmpty()) {
            return frame.getRecords().toByteArray();
          }
        }
      }
    } finally {
      stream.cancel("done", null);
    }
  }

  /** Returns a record batch of format 1 with only values, uncompressed, of a producer that is not idempotent. */
  static byte[] encode(List<byte[]> values, long nowMs) {
    ByteBuffer offsets = little(4 * (values.size() + 1)).putInt(0);
    ByteArrayOutputStream data = new ByteArrayOutputStream();
    for (byte[] value : values) {
      data.writeBytes(value);
      offsets.putInt(data.size());
    }
    byte[] ends = padded(offsets.array());
    List<Place> places =
        List.of(new Place(0, 0), new Place(0, offsets.capacity()), new Place(ends.length, data.size()));
    byte[] rest = padded(data.toByteArray());
    byte[] metadata = arrowMetadata(values.size(), places, ends.length + rest.length);
    ByteBuffer batch = little(HEADER_BYTES + metadata.length + ends.length + rest.length);
    batch.putLong(0).putInt(batch.capacity() - 12).putInt(-1).put((byte) 1); // partition_leader_epoch, magic
    batch.putInt(0).putShort((short) 0); // the checksum comes last; attributes
    batch.putInt(values.size() - 1).putInt(values.size()).putLong(nowMs).putLong(nowMs);
    batch.putLong(-1).putShort((short) -1).putInt(-1); // producer_id, producer_epoch, base_sequence
    batch.put(new byte[3]).put(metadata).put(ends).put(rest);
    batch.putInt(17, checksum(batch.array(), 21, batch.capacity()));
    return batch.array();
  }

  static int checksum(byte[] bytes, int from, int to) {
    CRC32C sum = new CRC32C();
    sum.update(bytes, from, to - from);
    return (int) sum.getValue();
  }

  static ByteBuffer little(int size) {
    return ByteBuffer.allocate(size).order(ByteOrder.LITTLE_ENDIAN);
  }

  static byte[] padded(byte[] part) {
    return java.util.Arrays.copyOf(part, (part.length + 7) / 8 * 8);
  }

  /** Returns the encapsulated message of a RecordBatch up to its body (Arrow's Message.fbs). */
  static byte[] arrowMetadata(long rows, List<Place> places, long bodyBytes) {
    FlatBufferBuilder builder = new FlatBufferBuilder(256);
    int nodes = pairs(builder, List.of(new Place(rows, 0)));
    int buffers = pairs(builder, places);
    builder.startTable(4);
    builder.addLong(0, rows, 0);
    builder.addOffset(1, nodes, 0);
    builder.addOffset(2, buffers, 0);
    int batch = builder.endTable();
    builder.startTable(5);
    builder.addShort(0, (short) 4, 0); // MetadataVersion.V5
    builder.addByte(1, (byte) 3, 0); // MessageHeader.RecordBatch
    builder.addOffset(2, batch, 0);
    builder.addLong(3, bodyBytes, 0);
    builder.finish(builder.endTable());
    byte[] table = padded(builder.sizedByteArray());
    return little(8 + table.length).putInt(-1).putInt(table.length).put(table).array();
  }

  static int pairs(FlatBufferBuilder builder, List<Place> places) {
    builder.startVector(16, places.size(), 8);
    for (int number = places.size() - 1; number >= 0; number--) {
      builder.putLong(places.get(number).length());
      builder.putLong(places.get(number).position());
    }
    return builder.endVector();
  }

  /** Returns the values of the batch at that offset, and checks what a reader checks. */
  static List<String> decode(byte[] records, long offset) {
    ByteBuffer all = ByteBuffer.wrap(records).order(ByteOrder.LITTLE_ENDIAN);
    for (int at = 0; at + HEADER_BYTES <= records.length; at += all.getInt(at + 8) + 12) {
      if (all.getLong(at) != offset) {
        continue; // begins before the wanted offset
      }
      int end = at + all.getInt(at + 8) + 12;
      if (all.get(at + 16) != 1 || (all.getShort(at + 21) & 0x7f) != 0) {
        throw new IllegalStateException("magic " + all.get(at + 16) + ", attributes " + all.getShort(at + 21));
      }
      if (checksum(records, at + 21, end) != all.getInt(at + 17)) {
        throw new IllegalStateException("a wrong checksum");
      }
      int message = at + HEADER_BYTES;
      if (all.getInt(message) != -1) {
        throw new IllegalStateException("no Arrow message");
      }
      int body = message + 8 + all.getInt(message + 4);
      List<Place> places = Message.placesOf(all.duplicate().order(ByteOrder.LITTLE_ENDIAN), message + 8);
      int ends = body + (int) places.get(1).position();
      int data = body + (int) places.get(2).position();
      List<String> values = new ArrayList<>();
      for (int row = 0; row < all.getInt(at + 27); row++) {
        int from = all.getInt(ends + 4 * row);
        int to = all.getInt(ends + 4 * row + 4);
        values.add(new String(records, data + from, to - from, StandardCharsets.UTF_8));
      }
      return values;
    }
    throw new IllegalStateException("no batch at offset " + offset);
  }

  /** A table of the flatbuffer; flatc would generate such classes of Arrow's schemas. */
  static final class Message extends Table {
    Message(ByteBuffer bytes, int position) {
      __reset(position, bytes);
    }

    /** Returns the position and length of each buffer of a RecordBatch message. */
    static List<Place> placesOf(ByteBuffer bytes, int root) {
      Message message = new Message(bytes, root + bytes.getInt(root));
      Message batch = new Message(bytes, message.__indirect(message.bb_pos + message.__offset(8)));
      int field = batch.__offset(8);
      List<Place> places = new ArrayList<>();
      for (int number = 0; number < batch.__vector_len(field); number++) {
        int at = batch.__vector(field) + 16 * number;
        places.add(new Place(bytes.getLong(at), bytes.getLong(at + 8)));
      }
      return places;
    }
  }
}
