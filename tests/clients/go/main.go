// A smoke client, written from proto/, docs/protocol.md and docs/format.md alone.
//
// It asks a broker what it speaks, finds a topic's leader, produces one batch of format 1 after it was refused for a leader
// epoch that it made up, and fetches the batch back. It prints what it has seen as one JSON object.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"os"
	"slices"
	"time"

	flatbuffers "github.com/google/flatbuffers/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "raftlog/v1"
)

const headerBytes = 64

type seen struct {
	BaseOffset int64    `json:"base_offset"`
	Values     []string `json:"values"`
	Refusals   []string `json:"refusals"`
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	found, err := run(ctx, os.Args[1], os.Args[2])
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
	json.NewEncoder(os.Stdout).Encode(found)
}

func run(ctx context.Context, bootstrap, topic string) (*seen, error) {
	connection, err := grpc.NewClient(bootstrap, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	metadata, log, result := pb.NewMetadataClient(connection), pb.NewLogClient(connection), &seen{}

	versions, err := metadata.ApiVersions(ctx, &pb.ApiVersionsRequest{ClientSoftwareName: "smoke-go"})
	if err != nil {
		return nil, err
	}
	if !slices.Contains(versions.Methods, "/raftlog.v1.Log/Produce") || !slices.Contains(versions.RecordFormats, 1) {
		return nil, fmt.Errorf("the broker does not speak what this client does: %v", versions)
	}

	// A stream whose first request is not `open` ends with a status that carries an Error.
	refused, err := log.Fetch(ctx)
	if err != nil {
		return nil, err
	}
	refused.Send(&pb.FetchRequest{Request: &pb.FetchRequest_Credit{Credit: &pb.GrantCredit{Bytes: 1}}})
	if _, err = refused.Recv(); err == nil {
		return nil, fmt.Errorf("a fetch session without an open was not refused")
	}
	for _, detail := range status.Convert(err).Details() {
		if refusal, ok := detail.(*pb.Error); ok {
			result.Refusals = append(result.Refusals, refusal.Code.String()+" "+retryOf(refusal.Code).String())
		}
	}

	values := [][]byte{[]byte("hello"), []byte(""), []byte("from Go")}
	batch := encode(values, time.Now().UnixMilli())
	epoch := int32(1_000_000) // made up: refused, and the table says what to do
	var info *pb.TopicInfo
	for attempt := 0; ; attempt++ {
		if info, err = describe(ctx, metadata, topic); err != nil {
			return nil, err
		}
		if attempt > 0 {
			epoch = info.Partitions[0].LeaderEpoch
		}
		offset, refusal, err := produce(ctx, log, info.TopicId, epoch, batch)
		if err != nil {
			return nil, err
		}
		if refusal == nil {
			result.BaseOffset = offset
			break
		}
		retry := retryOf(refusal.Code)
		result.Refusals = append(result.Refusals, refusal.Code.String()+" "+retry.String())
		again := retry == pb.Retry_RETRY_SAME || retry == pb.Retry_RETRY_REFRESH // a loop asks for metadata anyway
		if !again || attempt > 20 {
			return nil, fmt.Errorf("%v is final here: %s", refusal.Code, refusal.Message)
		}
		time.Sleep(time.Duration(min(attempt, 10)) * 100 * time.Millisecond)
	}
	records, err := fetch(ctx, log, info.TopicId, epoch, result.BaseOffset)
	if err != nil {
		return nil, err
	}
	result.Values, err = decode(records, result.BaseOffset)
	return result, err
}

// retryOf returns the option of an error code's value; an unknown code is final.
func retryOf(code pb.ErrorCode) pb.Retry {
	value := code.Descriptor().Values().ByNumber(code.Number())
	if value == nil {
		return pb.Retry_RETRY_FINAL
	}
	return proto.GetExtension(value.Options(), pb.E_Retry).(pb.Retry)
}

func describe(ctx context.Context, metadata pb.MetadataClient, topic string) (*pb.TopicInfo, error) {
	for attempt := 0; ; attempt++ {
		answer, err := metadata.Get(ctx, &pb.MetadataRequest{Topics: []string{topic}})
		if err != nil {
			return nil, err
		}
		info := answer.Topics[0]
		if code := info.Error.GetCode(); code == pb.ErrorCode_NONE {
			return info, nil
		} else if retryOf(code) == pb.Retry_RETRY_FINAL || attempt > 20 {
			return nil, fmt.Errorf("%v: %s", code, info.Error.Message)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func produce(ctx context.Context, log pb.LogClient, topicID []byte, epoch int32, batch []byte) (int64, *pb.Error, error) {
	stream, err := log.Produce(ctx)
	if err != nil {
		return 0, nil, err
	}
	defer stream.CloseSend()
	part := &pb.ProducePartition{TopicId: topicID, LeaderEpoch: epoch, Records: batch}
	request := &pb.ProduceRequest{CorrelationId: 7, Acks: pb.Acks_ALL, Partitions: []*pb.ProducePartition{part}}
	if err = stream.Send(request); err != nil {
		return 0, nil, err
	}
	answer, err := stream.Recv()
	if err != nil {
		return 0, nil, err
	}
	if answer.CorrelationId != 7 || len(answer.Results) != 1 {
		return 0, nil, fmt.Errorf("an answer to another request: %v", answer)
	}
	if result := answer.Results[0]; result.Error.GetCode() == pb.ErrorCode_NONE {
		return result.BaseOffset, nil, nil
	} else {
		return 0, result.Error, nil
	}
}

func fetch(ctx context.Context, log pb.LogClient, topicID []byte, epoch int32, offset int64) ([]byte, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := log.Fetch(ctx)
	if err != nil {
		return nil, err
	}
	part := &pb.FetchPartition{SubscriptionId: 1, TopicId: topicID, Offset: offset, LeaderEpoch: epoch}
	stream.Send(&pb.FetchRequest{Request: &pb.FetchRequest_Open{Open: &pb.OpenFetchSession{CreditBytes: 1 << 20}}})
	stream.Send(&pb.FetchRequest{Request: &pb.FetchRequest_Subscribe{
		Subscribe: &pb.Subscribe{Partitions: []*pb.FetchPartition{part}}}})
	for {
		answer, err := stream.Recv()
		if err != nil {
			return nil, err
		}
		for _, frame := range answer.Frames {
			if frame.Error.GetCode() != pb.ErrorCode_NONE {
				return nil, fmt.Errorf("%v: %s", frame.Error.Code, frame.Error.Message)
			}
			if len(frame.Records) > 0 {
				return frame.Records, nil
			}
		}
	}
}

// encode returns a record batch of format 1 with only values, uncompressed, of a producer that is not idempotent.
func encode(values [][]byte, nowMs int64) []byte {
	offsets, data := make([]byte, 4), []byte{}
	for _, value := range values {
		data = append(data, value...)
		offsets = binary.LittleEndian.AppendUint32(offsets, uint32(len(data)))
	}
	buffers := [][2]int64{{0, 0}, {0, int64(len(offsets))}, {int64(len(padded(offsets))), int64(len(data))}}
	body := append(padded(offsets), padded(data)...)
	message := append(arrowMetadata(int64(len(values)), buffers, int64(len(body))), body...)

	header := make([]byte, headerBytes)
	little := binary.LittleEndian
	minusOne := ^uint64(0)
	little.PutUint32(header[8:], uint32(headerBytes+len(message)-12))
	little.PutUint32(header[12:], uint32(minusOne&0xffffffff)) // partition_leader_epoch -1
	header[16] = 1                                             // magic
	little.PutUint32(header[23:], uint32(len(values)-1))       // last_offset_delta
	little.PutUint32(header[27:], uint32(len(values)))         // record_count
	little.PutUint64(header[31:], uint64(nowMs))
	little.PutUint64(header[39:], uint64(nowMs))
	little.PutUint64(header[47:], minusOne)                    // producer_id
	little.PutUint16(header[55:], 0xffff)                      // producer_epoch
	little.PutUint32(header[57:], uint32(minusOne&0xffffffff)) // base_sequence
	batch := append(header, message...)
	little.PutUint32(batch[17:], crc32.Checksum(batch[21:], crc32.MakeTable(crc32.Castagnoli)))
	return batch
}

func padded(part []byte) []byte {
	return append(slices.Clone(part), make([]byte, (8-len(part)%8)%8)...)
}

// arrowMetadata returns the encapsulated message of a RecordBatch up to its body (Arrow's Message.fbs).
func arrowMetadata(rows int64, buffers [][2]int64, bodyBytes int64) []byte {
	build := flatbuffers.NewBuilder(256)
	pairs := func(listed [][2]int64) flatbuffers.UOffsetT {
		build.StartVector(16, len(listed), 8)
		for _, pair := range slices.Backward(listed) {
			build.PrependInt64(pair[1])
			build.PrependInt64(pair[0])
		}
		return build.EndVector(len(listed))
	}
	nodes, places := pairs([][2]int64{{rows, 0}}), pairs(buffers)
	build.StartObject(4)
	build.PrependInt64Slot(0, rows, 0)
	build.PrependUOffsetTSlot(1, nodes, 0)
	build.PrependUOffsetTSlot(2, places, 0)
	batch := build.EndObject()
	build.StartObject(5)
	build.PrependInt16Slot(0, 4, 0) // MetadataVersion.V5
	build.PrependByteSlot(1, 3, 0)  // MessageHeader.RecordBatch
	build.PrependUOffsetTSlot(2, batch, 0)
	build.PrependInt64Slot(3, bodyBytes, 0)
	build.Finish(build.EndObject())
	table := padded(build.FinishedBytes())
	prefix := binary.LittleEndian.AppendUint32([]byte{0xff, 0xff, 0xff, 0xff}, uint32(len(table)))
	return append(prefix, table...)
}

// decode returns the values of the batch at that offset, and checks what a reader checks.
func decode(records []byte, offset int64) ([]string, error) {
	little := binary.LittleEndian
	for len(records) >= headerBytes {
		batch := records[:little.Uint32(records[8:])+12]
		records = records[len(batch):]
		if int64(little.Uint64(batch)) != offset {
			continue // begins before the wanted offset
		}
		if batch[16] != 1 || little.Uint16(batch[21:])&0x7f != 0 {
			return nil, fmt.Errorf("magic %d, attributes %x", batch[16], little.Uint16(batch[21:]))
		}
		if crc32.Checksum(batch[21:], crc32.MakeTable(crc32.Castagnoli)) != little.Uint32(batch[17:]) {
			return nil, fmt.Errorf("a wrong checksum")
		}
		rows := int(little.Uint32(batch[27:]))
		message := batch[headerBytes:]
		if !bytes.Equal(message[:4], []byte{0xff, 0xff, 0xff, 0xff}) {
			return nil, fmt.Errorf("no Arrow message")
		}
		table := message[8 : 8+little.Uint32(message[4:])]
		body := message[8+len(table):]
		buffers := placesOf(table)
		ends, data := body[buffers[1][0]:], body[buffers[2][0]:]
		values := make([]string, rows)
		for row := range values {
			values[row] = string(data[little.Uint32(ends[4*row:]):little.Uint32(ends[4*row+4:])])
		}
		return values, nil
	}
	return nil, fmt.Errorf("no batch at offset %d", offset)
}

// placesOf returns the position and length of each buffer of a RecordBatch message.
func placesOf(table []byte) [][2]int64 {
	message := &flatbuffers.Table{Bytes: table, Pos: flatbuffers.GetUOffsetT(table)}
	batch := &flatbuffers.Table{Bytes: table}
	message.Union(batch, flatbuffers.UOffsetT(message.Offset(8)))
	at := flatbuffers.UOffsetT(batch.Offset(8))
	places := make([][2]int64, batch.VectorLen(at))
	for number := range places {
		start := batch.Vector(at) + flatbuffers.UOffsetT(16*number)
		places[number] = [2]int64{flatbuffers.GetInt64(table[start:]), flatbuffers.GetInt64(table[start+8:])}
	}
	return places
}
