"""The messages that this broker speaks with Kafka clients: their fields by version, and the versions that it offers.

The form of the table is described in `codec.py`. Tests compare it with what other implementations send and read.
"""

from __future__ import annotations

from typing import Final

from broker.kafka.codec import MAX_WITH_REPLICAS, Message, definitions

_TABLE: Final = """\
ProduceRequest 0 3-13 flexible 9
    transactional_id: string null = null
    acks: int16
    timeout_ms: int32
    topic_data: []
        name: string 0-12
        topic_id: uuid 13+
        partition_data: []
            index: int32
            records: records null

ProduceResponse 3-13 flexible 9
    responses: []
        name: string 0-12
        topic_id: uuid 13+
        partition_responses: []
            index: int32
            error_code: int16
            base_offset: int64
            log_append_time_ms: int64 = -1
            log_start_offset: int64 5+ = -1
            record_errors: [] 8+
                batch_index: int32
                batch_index_error_message: string null = null
            error_message: string 8+ null = null
            current_leader: struct 10+ tag0
                leader_id: int32 = -1
                leader_epoch: int32 = -1
    throttle_time_ms: int32
    node_endpoints: [] 10+ tag0
        node_id: int32
        host: string
        port: int32
        rack: string null = null

FetchRequest 1 4-17 flexible 12
    cluster_id: string 12+ null tag0 = null
    replica_id: int32 4-14 = -1
    replica_state: struct 15+ tag1
        replica_id: int32 = -1
        replica_epoch: int64 = -1
    max_wait_ms: int32
    min_bytes: int32
    max_bytes: int32 = 2147483647
    isolation_level: int8
    session_id: int32 7+
    session_epoch: int32 7+ = -1
    topics: []
        topic: string 4-12
        topic_id: uuid 13+
        partitions: []
            partition: int32
            current_leader_epoch: int32 9+ = -1
            fetch_offset: int64
            last_fetched_epoch: int32 12+ = -1
            log_start_offset: int64 5+ = -1
            partition_max_bytes: int32
            replica_directory_id: uuid 17+ tag0
    forgotten_topics_data: [] 7+
        topic: string 7-12
        topic_id: uuid 13+
        partitions: []int32
    rack_id: string 11+

FetchResponse 4-17 flexible 12
    throttle_time_ms: int32
    error_code: int16 7+
    session_id: int32 7+
    responses: []
        topic: string 4-12
        topic_id: uuid 13+
        partitions: []
            partition_index: int32
            error_code: int16
            high_watermark: int64
            last_stable_offset: int64 = -1
            log_start_offset: int64 5+ = -1
            diverging_epoch: struct 12+ tag0
                epoch: int32 = -1
                end_offset: int64 = -1
            current_leader: struct 12+ tag1
                leader_id: int32 = -1
                leader_epoch: int32 = -1
            aborted_transactions: [] null
                producer_id: int64
                first_offset: int64
            preferred_read_replica: int32 11+ = -1
            records: records null
    node_endpoints: [] 16+ tag0
        node_id: int32
        host: string
        port: int32
        rack: string null = null

ListOffsetsRequest 2 1-7 flexible 6
    replica_id: int32
    isolation_level: int8 2+
    topics: []
        name: string
        partitions: []
            partition_index: int32
            current_leader_epoch: int32 4+ = -1
            timestamp: int64

ListOffsetsResponse 1-7 flexible 6
    throttle_time_ms: int32 2+
    topics: []
        name: string
        partitions: []
            partition_index: int32
            error_code: int16
            timestamp: int64 = -1
            offset: int64 = -1
            leader_epoch: int32 4+ = -1

MetadataRequest 3 0-13 flexible 9
    topics: [] null1
        topic_id: uuid 10+
        name: string null10
    allow_auto_topic_creation: bool 4+ = 1
    include_cluster_authorized_operations: bool 8-10
    include_topic_authorized_operations: bool 8+

MetadataResponse 0-13 flexible 9
    throttle_time_ms: int32 3+
    brokers: []
        node_id: int32
        host: string
        port: int32
        rack: string 1+ null = null
    cluster_id: string 2+ null = null
    controller_id: int32 1+ = -1
    topics: []
        error_code: int16
        name: string null12
        topic_id: uuid 10+
        is_internal: bool 1+
        partitions: []
            error_code: int16
            partition_index: int32
            leader_id: int32
            leader_epoch: int32 7+ = -1
            replica_nodes: []int32
            isr_nodes: []int32
            offline_replicas: []int32 5+
        topic_authorized_operations: int32 8+ = -2147483648
    cluster_authorized_operations: int32 8-10 = -2147483648
    error_code: int16 13+

OffsetCommitRequest 8 2-9 flexible 8
    group_id: string
    generation_id_or_member_epoch: int32 = -1
    member_id: string
    group_instance_id: string 7+ null = null
    retention_time_ms: int64 2-4 = -1
    topics: []
        name: string
        partitions: []
            partition_index: int32
            committed_offset: int64
            committed_leader_epoch: int32 6+ = -1
            committed_metadata: string null

OffsetCommitResponse 2-9 flexible 8
    throttle_time_ms: int32 3+
    topics: []
        name: string
        partitions: []
            partition_index: int32
            error_code: int16

OffsetFetchRequest 9 1-9 flexible 6
    group_id: string 1-7
    topics: [] 1-7 null2
        name: string
        partition_indexes: []int32
    groups: [] 8+
        group_id: string
        member_id: string 9+ null = null
        member_epoch: int32 9+ = -1
        topics: [] null
            name: string
            partition_indexes: []int32
    require_stable: bool 7+

OffsetFetchResponse 1-9 flexible 6
    throttle_time_ms: int32 3+
    topics: [] 1-7
        name: string
        partitions: []
            partition_index: int32
            committed_offset: int64
            committed_leader_epoch: int32 5-7 = -1
            metadata: string null
            error_code: int16
    error_code: int16 2-7
    groups: [] 8+
        group_id: string
        topics: []
            name: string
            partitions: []
                partition_index: int32
                committed_offset: int64
                committed_leader_epoch: int32 = -1
                metadata: string null
                error_code: int16
        error_code: int16

FindCoordinatorRequest 10 0-4 flexible 3
    key: string 0-3
    key_type: int8 1+
    coordinator_keys: []string 4+

FindCoordinatorResponse 0-4 flexible 3
    throttle_time_ms: int32 1+
    error_code: int16 0-3
    error_message: string 1-3 null
    node_id: int32 0-3
    host: string 0-3
    port: int32 0-3
    coordinators: [] 4+
        key: string
        node_id: int32
        host: string
        port: int32
        error_code: int16
        error_message: string null

SaslHandshakeRequest 17 0-1 flexible never
    mechanism: string

SaslHandshakeResponse 0-1 flexible never
    error_code: int16
    mechanisms: []string

JoinGroupRequest 11 0-9 flexible 6
    group_id: string
    session_timeout_ms: int32
    rebalance_timeout_ms: int32 1+ = -1
    member_id: string
    group_instance_id: string 5+ null = null
    protocol_type: string
    protocols: []
        name: string
        metadata: bytes
    reason: string 8+ null = null

JoinGroupResponse 0-9 flexible 6
    throttle_time_ms: int32 2+
    error_code: int16
    generation_id: int32 = -1
    protocol_type: string 7+ null = null
    protocol_name: string null7
    leader: string
    skip_assignment: bool 9+
    member_id: string
    members: []
        member_id: string
        group_instance_id: string 5+ null = null
        metadata: bytes

HeartbeatRequest 12 0-4 flexible 4
    group_id: string
    generation_id: int32
    member_id: string
    group_instance_id: string 3+ null = null

HeartbeatResponse 0-4 flexible 4
    throttle_time_ms: int32 1+
    error_code: int16

LeaveGroupRequest 13 0-5 flexible 4
    group_id: string
    member_id: string 0-2
    members: [] 3+
        member_id: string
        group_instance_id: string null = null
        reason: string 5+ null = null

LeaveGroupResponse 0-5 flexible 4
    throttle_time_ms: int32 1+
    error_code: int16
    members: [] 3+
        member_id: string
        group_instance_id: string null
        error_code: int16

SyncGroupRequest 14 0-5 flexible 4
    group_id: string
    generation_id: int32
    member_id: string
    group_instance_id: string 3+ null = null
    protocol_type: string 5+ null = null
    protocol_name: string 5+ null = null
    assignments: []
        member_id: string
        assignment: bytes

SyncGroupResponse 0-5 flexible 4
    throttle_time_ms: int32 1+
    error_code: int16
    protocol_type: string 5+ null = null
    protocol_name: string 5+ null = null
    assignment: bytes

DescribeGroupsRequest 15 0-6 flexible 5
    groups: []string
    include_authorized_operations: bool 3+

DescribeGroupsResponse 0-6 flexible 5
    throttle_time_ms: int32 1+
    groups: []
        error_code: int16
        error_message: string 6+ null = null
        group_id: string
        group_state: string
        protocol_type: string
        protocol_data: string
        members: []
            member_id: string
            group_instance_id: string 4+ null = null
            client_id: string
            client_host: string
            member_metadata: bytes
            member_assignment: bytes
        authorized_operations: int32 3+ = -2147483648

ListGroupsRequest 16 0-5 flexible 3
    states_filter: []string 4+
    types_filter: []string 5+

ListGroupsResponse 0-5 flexible 3
    throttle_time_ms: int32 1+
    error_code: int16
    groups: []
        group_id: string
        protocol_type: string
        group_state: string 4+
        group_type: string 5+

ConsumerGroupHeartbeatRequest 68 0-1 flexible 0
    group_id: string
    member_id: string
    member_epoch: int32
    instance_id: string null = null
    rack_id: string null = null
    rebalance_timeout_ms: int32 = -1
    subscribed_topic_names: []string null = null
    subscribed_topic_regex: string 1+ null = null
    server_assignor: string null = null
    topic_partitions: [] null = null
        topic_id: uuid
        partitions: []int32

ConsumerGroupHeartbeatResponse 0-1 flexible 0
    throttle_time_ms: int32
    error_code: int16
    error_message: string null = null
    member_id: string null = null
    member_epoch: int32
    heartbeat_interval_ms: int32
    assignment: struct null = null
        topic_partitions: []
            topic_id: uuid
            partitions: []int32

ConsumerGroupDescribeRequest 69 0-1 flexible 0
    group_ids: []string
    include_authorized_operations: bool

ConsumerGroupDescribeResponse 0-1 flexible 0
    throttle_time_ms: int32
    groups: []
        error_code: int16
        error_message: string null = null
        group_id: string
        group_state: string
        group_epoch: int32
        assignment_epoch: int32
        assignor_name: string
        members: []
            member_id: string
            instance_id: string null = null
            rack_id: string null = null
            member_epoch: int32
            client_id: string
            client_host: string
            subscribed_topic_names: []string
            subscribed_topic_regex: string null = null
            assignment: struct
                topic_partitions: []
                    topic_id: uuid
                    topic_name: string
                    partitions: []int32
            target_assignment: struct
                topic_partitions: []
                    topic_id: uuid
                    topic_name: string
                    partitions: []int32
            member_type: int8 1+ = -1
        authorized_operations: int32 = -2147483648

DeleteGroupsRequest 42 0-2 flexible 2
    groups_names: []string

DeleteGroupsResponse 0-2 flexible 2
    throttle_time_ms: int32
    results: []
        group_id: string
        error_code: int16

OffsetDeleteRequest 47 0-0 flexible never
    group_id: string
    topics: []
        name: string
        partitions: []
            partition_index: int32

OffsetDeleteResponse 0-0 flexible never
    error_code: int16
    throttle_time_ms: int32
    topics: []
        name: string
        partitions: []
            partition_index: int32
            error_code: int16

ApiVersionsRequest 18 0-4 flexible 3
    client_software_name: string 3+
    client_software_version: string 3+

ApiVersionsResponse 0-4 flexible 3
    error_code: int16
    api_keys: []
        api_key: int16
        min_version: int16
        max_version: int16
    throttle_time_ms: int32 1+
    supported_features: [] 3+ tag0
        name: string
        min_version: int16
        max_version: int16
    finalized_features_epoch: int64 3+ tag1 = -1
    finalized_features: [] 3+ tag2
        name: string
        max_version_level: int16
        min_version_level: int16

CreateTopicsRequest 19 2-7 flexible 5
    topics: []
        name: string
        num_partitions: int32
        replication_factor: int16
        assignments: []
            partition_index: int32
            broker_ids: []int32
        configs: []
            name: string
            value: string null
    timeout_ms: int32 = 60000
    validate_only: bool

CreateTopicsResponse 2-7 flexible 5
    throttle_time_ms: int32
    topics: []
        name: string
        topic_id: uuid 7+
        error_code: int16
        error_message: string null
        topic_config_error_code: int16 5+ tag0
        num_partitions: int32 5+ = -1
        replication_factor: int16 5+ = -1
        configs: [] 5+ null
            name: string
            value: string null
            read_only: bool
            config_source: int8 = -1
            is_sensitive: bool

DeleteTopicsRequest 20 1-6 flexible 4
    topics: [] 6+
        name: string null = null
        topic_id: uuid
    topic_names: []string 1-5
    timeout_ms: int32

DeleteTopicsResponse 1-6 flexible 4
    throttle_time_ms: int32
    responses: []
        name: string null6
        topic_id: uuid 6+
        error_code: int16
        error_message: string 5+ null = null

InitProducerIdRequest 22 0-5 flexible 2
    transactional_id: string null
    transaction_timeout_ms: int32
    producer_id: int64 3+ = -1
    producer_epoch: int16 3+ = -1

InitProducerIdResponse 0-5 flexible 2
    throttle_time_ms: int32
    error_code: int16
    producer_id: int64 = -1
    producer_epoch: int16

AddPartitionsToTxnRequest 24 0-3 flexible 3
    transactional_id: string
    producer_id: int64
    producer_epoch: int16
    topics: []
        name: string
        partitions: []int32

AddPartitionsToTxnResponse 0-3 flexible 3
    throttle_time_ms: int32
    results_by_topic: []
        name: string
        results_by_partition: []
            partition_index: int32
            partition_error_code: int16

AddOffsetsToTxnRequest 25 0-4 flexible 3
    transactional_id: string
    producer_id: int64
    producer_epoch: int16
    group_id: string

AddOffsetsToTxnResponse 0-4 flexible 3
    throttle_time_ms: int32
    error_code: int16

EndTxnRequest 26 0-5 flexible 3
    transactional_id: string
    producer_id: int64
    producer_epoch: int16
    committed: bool

EndTxnResponse 0-5 flexible 3
    throttle_time_ms: int32
    error_code: int16
    producer_id: int64 5+ = -1
    producer_epoch: int16 5+ = -1

WriteTxnMarkersRequest 27 1-2 flexible 1
    markers: []
        producer_id: int64
        producer_epoch: int16
        transaction_result: bool
        topics: []
            name: string
            partition_indexes: []int32
        coordinator_epoch: int32
        transaction_version: int8 2+

WriteTxnMarkersResponse 1-2 flexible 1
    markers: []
        producer_id: int64
        topics: []
            name: string
            partitions: []
                partition_index: int32
                error_code: int16

TxnOffsetCommitRequest 28 0-5 flexible 3
    transactional_id: string
    group_id: string
    producer_id: int64
    producer_epoch: int16
    generation_id: int32 3+ = -1
    member_id: string 3+
    group_instance_id: string 3+ null = null
    topics: []
        name: string
        partitions: []
            partition_index: int32
            committed_offset: int64
            committed_leader_epoch: int32 2+ = -1
            committed_metadata: string null

TxnOffsetCommitResponse 0-5 flexible 3
    throttle_time_ms: int32
    topics: []
        name: string
        partitions: []
            partition_index: int32
            error_code: int16

DescribeProducersRequest 61 0-0 flexible 0
    topics: []
        name: string
        partition_indexes: []int32

DescribeProducersResponse 0-0 flexible 0
    throttle_time_ms: int32
    topics: []
        name: string
        partitions: []
            partition_index: int32
            error_code: int16
            error_message: string null = null
            active_producers: []
                producer_id: int64
                producer_epoch: int32
                last_sequence: int32 = -1
                last_timestamp: int64 = -1
                coordinator_epoch: int32
                current_txn_start_offset: int64 = -1

DescribeTransactionsRequest 65 0-0 flexible 0
    transactional_ids: []string

DescribeTransactionsResponse 0-0 flexible 0
    throttle_time_ms: int32
    transaction_states: []
        error_code: int16
        transactional_id: string
        transaction_state: string
        transaction_timeout_ms: int32
        transaction_start_time_ms: int64
        producer_id: int64
        producer_epoch: int16
        topics: []
            topic: string
            partitions: []int32

ListTransactionsRequest 66 0-1 flexible 0
    state_filters: []string
    producer_id_filters: []int64
    duration_filter: int64 1+ = -1

ListTransactionsResponse 0-1 flexible 0
    throttle_time_ms: int32
    error_code: int16
    unknown_state_filters: []string
    transaction_states: []
        transactional_id: string
        producer_id: int64
        transaction_state: string

OffsetForLeaderEpochRequest 23 2-4 flexible 4
    replica_id: int32 3+ = -2
    topics: []
        topic: string
        partitions: []
            partition: int32
            current_leader_epoch: int32 = -1
            leader_epoch: int32

OffsetForLeaderEpochResponse 2-4 flexible 4
    throttle_time_ms: int32
    topics: []
        topic: string
        partitions: []
            error_code: int16
            partition: int32
            leader_epoch: int32 = -1
            end_offset: int64 = -1

SaslAuthenticateRequest 36 0-2 flexible 2
    auth_bytes: bytes

SaslAuthenticateResponse 0-2 flexible 2
    error_code: int16
    error_message: string null = null
    auth_bytes: bytes
    session_lifetime_ms: int64 1+

CreatePartitionsRequest 37 0-3 flexible 2
    topics: []
        name: string
        count: int32
        assignments: [] null
            broker_ids: []int32
    timeout_ms: int32
    validate_only: bool

CreatePartitionsResponse 0-3 flexible 2
    throttle_time_ms: int32
    results: []
        name: string
        error_code: int16
        error_message: string null = null

DeleteRecordsRequest 21 0-2 flexible 2
    topics: []
        name: string
        partitions: []
            partition_index: int32
            offset: int64
    timeout_ms: int32

DeleteRecordsResponse 0-2 flexible 2
    throttle_time_ms: int32
    topics: []
        name: string
        partitions: []
            partition_index: int32
            low_watermark: int64
            error_code: int16

DescribeConfigsRequest 32 1-4 flexible 4
    resources: []
        resource_type: int8
        resource_name: string
        configuration_keys: []string null
    include_synonyms: bool
    include_documentation: bool 3+

DescribeConfigsResponse 1-4 flexible 4
    throttle_time_ms: int32
    results: []
        error_code: int16
        error_message: string null
        resource_type: int8
        resource_name: string
        configs: []
            name: string
            value: string null
            read_only: bool
            config_source: int8 = -1
            is_sensitive: bool
            synonyms: []
                name: string
                value: string null
                source: int8
            config_type: int8 3+
            documentation: string 3+ null

IncrementalAlterConfigsRequest 44 0-1 flexible 1
    resources: []
        resource_type: int8
        resource_name: string
        configs: []
            name: string
            config_operation: int8
            value: string null
    validate_only: bool

IncrementalAlterConfigsResponse 0-1 flexible 1
    throttle_time_ms: int32
    responses: []
        error_code: int16
        error_message: string null
        resource_type: int8
        resource_name: string

DescribeAclsRequest 29 1-3 flexible 2
    resource_type_filter: int8
    resource_name_filter: string null
    pattern_type_filter: int8 = 3
    principal_filter: string null
    host_filter: string null
    operation: int8
    permission_type: int8

DescribeAclsResponse 1-3 flexible 2
    throttle_time_ms: int32
    error_code: int16
    error_message: string null = null
    resources: []
        resource_type: int8
        resource_name: string
        pattern_type: int8 = 3
        acls: []
            principal: string
            host: string
            operation: int8
            permission_type: int8

CreateAclsRequest 30 1-3 flexible 2
    creations: []
        resource_type: int8
        resource_name: string
        resource_pattern_type: int8 = 3
        principal: string
        host: string
        operation: int8
        permission_type: int8

CreateAclsResponse 1-3 flexible 2
    throttle_time_ms: int32
    results: []
        error_code: int16
        error_message: string null

DeleteAclsRequest 31 1-3 flexible 2
    filters: []
        resource_type_filter: int8
        resource_name_filter: string null
        pattern_type_filter: int8 = 3
        principal_filter: string null
        host_filter: string null
        operation: int8
        permission_type: int8

DeleteAclsResponse 1-3 flexible 2
    throttle_time_ms: int32
    filter_results: []
        error_code: int16
        error_message: string null = null
        matching_acls: []
            error_code: int16
            error_message: string null
            resource_type: int8
            resource_name: string
            pattern_type: int8 = 3
            principal: string
            host: string
            operation: int8
            permission_type: int8

DescribeClientQuotasRequest 48 0-1 flexible 1
    components: []
        entity_type: string
        match_type: int8
        match: string null
    strict: bool

DescribeClientQuotasResponse 0-1 flexible 1
    throttle_time_ms: int32
    error_code: int16
    error_message: string null = null
    entries: [] null
        entity: []
            entity_type: string
            entity_name: string null
        values: []
            key: string
            value: float64

AlterClientQuotasRequest 49 0-1 flexible 1
    entries: []
        entity: []
            entity_type: string
            entity_name: string null
        ops: []
            key: string
            value: float64
            remove: bool
    validate_only: bool

AlterClientQuotasResponse 0-1 flexible 1
    throttle_time_ms: int32
    entries: []
        error_code: int16
        error_message: string null
        entity: []
            entity_type: string
            entity_name: string null

DescribeUserScramCredentialsRequest 50 0-0 flexible 0
    users: [] null
        name: string

DescribeUserScramCredentialsResponse 0-0 flexible 0
    throttle_time_ms: int32
    error_code: int16
    error_message: string null = null
    results: []
        user: string
        error_code: int16
        error_message: string null = null
        credential_infos: []
            mechanism: int8
            iterations: int32

AlterUserScramCredentialsRequest 51 0-0 flexible 0
    deletions: []
        name: string
        mechanism: int8
    upsertions: []
        name: string
        mechanism: int8
        iterations: int32
        salt: bytes
        salted_password: bytes

AlterUserScramCredentialsResponse 0-0 flexible 0
    throttle_time_ms: int32
    results: []
        user: string
        error_code: int16
        error_message: string null

AlterConfigsRequest 33 0-2 flexible 2
    resources: []
        resource_type: int8
        resource_name: string
        configs: []
            name: string
            value: string null
    validate_only: bool

AlterConfigsResponse 0-2 flexible 2
    throttle_time_ms: int32
    responses: []
        error_code: int16
        error_message: string null
        resource_type: int8
        resource_name: string

DescribeLogDirsRequest 35 1-4 flexible 2
    topics: [] null
        topic: string
        partitions: []int32

DescribeLogDirsResponse 1-4 flexible 2
    throttle_time_ms: int32
    error_code: int16 3+
    results: []
        error_code: int16
        log_dir: string
        topics: []
            name: string
            partitions: []
                partition_index: int32
                partition_size: int64
                offset_lag: int64
                is_future_key: bool
        total_bytes: int64 4+ = -1
        usable_bytes: int64 4+ = -1

ElectLeadersRequest 43 0-2 flexible 2
    election_type: int8 1+
    topic_partitions: [] null
        topic: string
        partitions: []int32
    timeout_ms: int32 = 60000

ElectLeadersResponse 0-2 flexible 2
    throttle_time_ms: int32
    error_code: int16 1+
    replica_election_results: []
        topic: string
        partition_result: []
            partition_id: int32
            error_code: int16
            error_message: string null

AlterPartitionReassignmentsRequest 45 0-1 flexible 0
    timeout_ms: int32 = 60000
    allow_replication_factor_change: bool 1+ = 1
    topics: []
        name: string
        partitions: []
            partition_index: int32
            replicas: []int32 null = null

AlterPartitionReassignmentsResponse 0-1 flexible 0
    throttle_time_ms: int32
    allow_replication_factor_change: bool 1+ = 1
    error_code: int16
    error_message: string null
    responses: []
        name: string
        partitions: []
            partition_index: int32
            error_code: int16
            error_message: string null

ListPartitionReassignmentsRequest 46 0-0 flexible 0
    timeout_ms: int32 = 60000
    topics: [] null = null
        name: string
        partition_indexes: []int32

ListPartitionReassignmentsResponse 0-0 flexible 0
    throttle_time_ms: int32
    error_code: int16
    error_message: string null
    topics: []
        name: string
        partitions: []
            partition_index: int32
            replicas: []int32
            adding_replicas: []int32
            removing_replicas: []int32

DescribeQuorumRequest 55 0-2 flexible 0
    topics: []
        topic_name: string
        partitions: []
            partition_index: int32

DescribeQuorumResponse 0-2 flexible 0
    error_code: int16
    error_message: string 2+ null
    topics: []
        topic_name: string
        partitions: []
            partition_index: int32
            error_code: int16
            error_message: string 2+ null
            leader_id: int32
            leader_epoch: int32
            high_watermark: int64
            current_voters: []
                replica_id: int32
                replica_directory_id: uuid 2+
                log_end_offset: int64
                last_fetch_timestamp: int64 1+ = -1
                last_caught_up_timestamp: int64 1+ = -1
            observers: []
                replica_id: int32
                replica_directory_id: uuid 2+
                log_end_offset: int64
                last_fetch_timestamp: int64 1+ = -1
                last_caught_up_timestamp: int64 1+ = -1
    nodes: [] 2+
        node_id: int32
        listeners: []
            name: string
            host: string
            port: uint16

DescribeTopicPartitionsRequest 75 0-0 flexible 0
    topics: []
        name: string
    response_partition_limit: int32 = 2000
    cursor: struct null = null
        topic_name: string
        partition_index: int32

DescribeTopicPartitionsResponse 0-0 flexible 0
    throttle_time_ms: int32
    topics: []
        error_code: int16
        name: string null
        topic_id: uuid
        is_internal: bool
        partitions: []
            error_code: int16
            partition_index: int32
            leader_id: int32
            leader_epoch: int32 = -1
            replica_nodes: []int32
            isr_nodes: []int32
            eligible_leader_replicas: []int32 null = null
            last_known_elr: []int32 null = null
            offline_replicas: []int32
        topic_authorized_operations: int32 = -2147483648
    next_cursor: struct null = null
        topic_name: string
        partition_index: int32

DescribeClusterRequest 60 0-1 flexible 0
    include_cluster_authorized_operations: bool
    endpoint_type: int8 1+ = 1

DescribeClusterResponse 0-1 flexible 0
    throttle_time_ms: int32
    error_code: int16
    error_message: string null = null
    endpoint_type: int8 1+ = 1
    cluster_id: string
    controller_id: int32 = -1
    brokers: []
        broker_id: int32
        host: string
        port: int32
        rack: string null = null
    cluster_authorized_operations: int32 = -2147483648
"""

_MESSAGES: Final = definitions(_TABLE)

REQUESTS: Final[dict[int, Message]] = {each.api_key: each for each in _MESSAGES.values() if each.api_key >= 0}
"""By API key."""
RESPONSES: Final[dict[int, Message]] = {
    each.api_key: _MESSAGES[each.name.removesuffix("Request") + "Response"] for each in REQUESTS.values()
}
"""By API key."""

PRODUCE: Final = 0
FETCH: Final = 1
LIST_OFFSETS: Final = 2
METADATA: Final = 3
OFFSET_COMMIT: Final = 8
OFFSET_FETCH: Final = 9
FIND_COORDINATOR: Final = 10
SASL_HANDSHAKE: Final = 17
JOIN_GROUP: Final = 11
HEARTBEAT: Final = 12
LEAVE_GROUP: Final = 13
SYNC_GROUP: Final = 14
DESCRIBE_GROUPS: Final = 15
LIST_GROUPS: Final = 16
API_VERSIONS: Final = 18
CREATE_TOPICS: Final = 19
DELETE_TOPICS: Final = 20
DELETE_RECORDS: Final = 21
INIT_PRODUCER_ID: Final = 22
OFFSET_FOR_LEADER_EPOCH: Final = 23
ADD_PARTITIONS_TO_TXN: Final = 24
ADD_OFFSETS_TO_TXN: Final = 25
END_TXN: Final = 26
WRITE_TXN_MARKERS: Final = 27
TXN_OFFSET_COMMIT: Final = 28
DESCRIBE_ACLS: Final = 29
CREATE_ACLS: Final = 30
DELETE_ACLS: Final = 31
DESCRIBE_CONFIGS: Final = 32
ALTER_CONFIGS: Final = 33
DESCRIBE_LOG_DIRS: Final = 35
SASL_AUTHENTICATE: Final = 36
CREATE_PARTITIONS: Final = 37
ELECT_LEADERS: Final = 43
DELETE_GROUPS: Final = 42
INCREMENTAL_ALTER_CONFIGS: Final = 44
ALTER_PARTITION_REASSIGNMENTS: Final = 45
LIST_PARTITION_REASSIGNMENTS: Final = 46
DESCRIBE_QUORUM: Final = 55
OFFSET_DELETE: Final = 47
DESCRIBE_CLIENT_QUOTAS: Final = 48
ALTER_CLIENT_QUOTAS: Final = 49
DESCRIBE_USER_SCRAM_CREDENTIALS: Final = 50
ALTER_USER_SCRAM_CREDENTIALS: Final = 51
DESCRIBE_CLUSTER: Final = 60
CONSUMER_GROUP_HEARTBEAT: Final = 68
CONSUMER_GROUP_DESCRIBE: Final = 69
DESCRIBE_PRODUCERS: Final = 61
DESCRIBE_TRANSACTIONS: Final = 65
LIST_TRANSACTIONS: Final = 66
DESCRIBE_TOPIC_PARTITIONS: Final = 75

for _key in (CREATE_TOPICS, CREATE_PARTITIONS, ALTER_PARTITION_REASSIGNMENTS):
    REQUESTS[_key].max_elements = MAX_WITH_REPLICAS

AUTHENTICATING: Final = frozenset({SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE})
"""What a client may send before it has authenticated."""
ADVERTISED_FROM: Final = {PRODUCE: 0}
"""The least version that ApiVersions names, where it is not the least that is served: librdkafka drops compression
silently unless Produce begins at 0 (KAFKA-18659)."""


def api_name(api_key: int) -> str:
    """Return the name of an API, such as `Fetch`."""
    return REQUESTS[api_key].name.removesuffix("Request")
