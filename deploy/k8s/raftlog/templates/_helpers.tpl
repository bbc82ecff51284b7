{{- define "raftlog.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "raftlog.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "raftlog.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "raftlog.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "raftlog.selector" -}}
app.kubernetes.io/name: {{ include "raftlog.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "raftlog.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "raftlog.selector" . }}
{{- end -}}

{{- define "raftlog.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "raftlog.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "raftlog.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "raftlog.separate" -}}
{{- if eq .Values.controllers.mode "separate" }}true{{ end -}}
{{- end -}}

{{/* Node ids: brokers count from 0, separate controllers from 1000, so that both can grow. */}}
{{- define "raftlog.controllerBase" -}}
{{- if include "raftlog.separate" . }}1000{{ else }}0{{ end -}}
{{- end -}}

{{- define "raftlog.brokers" -}}{{ include "raftlog.fullname" . }}-broker{{- end -}}
{{- define "raftlog.controllers" -}}{{ include "raftlog.fullname" . }}-controller{{- end -}}

{{/* The pods that vote. */}}
{{- define "raftlog.voterSet" -}}
{{- if include "raftlog.separate" . }}{{ include "raftlog.controllers" . }}{{ else }}{{ include "raftlog.brokers" . }}{{ end -}}
{{- end -}}

{{- define "raftlog.clusterId" -}}
{{- default (printf "%s/%s" .Release.Namespace (include "raftlog.fullname" .) | sha256sum | trunc 22) .Values.clusterId -}}
{{- end -}}

{{- define "raftlog.bootstrap" -}}
{{- $externalPort := .Values.ports.clients -}}
{{ include "raftlog.fullname" . }}.{{ .Release.Namespace }}.svc:{{ $externalPort }}
{{- end -}}

{{- define "raftlog.voters" -}}
{{- $root := . -}}
{{- $set := include "raftlog.voterSet" . -}}
{{- $base := include "raftlog.controllerBase" . | int -}}
{{- $voters := list -}}
{{- range $ordinal := until (int .Values.controllers.replicas) -}}
{{- $voters = append $voters (printf "%d@%s-%d.%s.%s.svc:%d" (add $base $ordinal) $set $ordinal $set $root.Release.Namespace (int $root.Values.ports.nodes)) -}}
{{- end -}}
{{- toJson $voters -}}
{{- end -}}

{{/* Whether clients and nodes use TLS. */}}
{{- define "raftlog.tls.spoken" -}}
{{- if and .Values.tls.enabled (ne .Values.tls.migration "prepare") }}true{{ end -}}
{{- end -}}

{{/* Secrets with certificates; of clients: empty if the chart's jobs present none. */}}
{{- define "raftlog.tls.brokers" -}}
{{- if .Values.tls.certManager.enabled }}{{ include "raftlog.brokers" . }}-tls{{ else }}{{ .Values.tls.secrets.brokers }}{{ end -}}
{{- end -}}
{{- define "raftlog.tls.controllers" -}}
{{- if .Values.tls.certManager.enabled }}{{ include "raftlog.controllers" . }}-tls{{ else }}{{ .Values.tls.secrets.controllers }}{{ end -}}
{{- end -}}
{{- define "raftlog.tls.clients" -}}
{{- if .Values.tls.certManager.enabled }}{{ include "raftlog.fullname" . }}-client-tls{{ else }}{{ .Values.tls.secrets.clients }}{{ end -}}
{{- end -}}

{{/* TOML of a map of server keys: quoted keys, JSON values, which TOML reads the same way. */}}
{{- define "raftlog.toml" -}}
{{- range $key, $value := . }}
{{ $key | quote }} = {{ toJson $value }}
{{- end }}
{{- end -}}

{{/* Refusals: clusters that would lose their quorum or refuse writes at the first maintenance. */}}
{{- define "raftlog.check" -}}
{{- $controllers := int .Values.controllers.replicas -}}
{{- $brokers := int .Values.brokers.replicas -}}
{{- $config := merge (dict) .Values.brokerConfig .Values.config -}}
{{- $rf := int (get $config "default.replication.factor" | default 1) -}}
{{- $minIsr := int (get $config "min.insync.replicas" | default 1) -}}
{{- $fullname := include "raftlog.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $fullname) -}}
{{- fail (printf "%s cannot be the name of a Service, which has small letters, digits and hyphens only, and begins with a letter: choose another name for the release, or set fullnameOverride" $fullname) -}}
{{- end -}}
{{- if not (or .Values.insecure .Values.tls.enabled) -}}
{{- fail "insecure: without tls.enabled the listeners are plaintext without authentication. Turn TLS on, or set insecure=true to accept that, and keep networkPolicy.enabled." -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- if and (ne .Values.tls.migration "none") (not .Values.insecure) -}}
{{- fail "tls.migration accepts plaintext as well: set insecure=true to allow that meanwhile" -}}
{{- end -}}
{{- if .Values.tls.certManager.enabled -}}
{{- if not .Values.tls.certManager.issuerRef.name -}}
{{- fail "tls.certManager.issuerRef.name is empty: name the issuer of your CA" -}}
{{- end -}}
{{- else -}}
{{- range $kind := ternary (list "brokers" "controllers") (list "brokers") (eq .Values.controllers.mode "separate") -}}
{{- if not (get $.Values.tls.secrets $kind) -}}
{{- fail (printf "tls.secrets.%s is empty: name the secret with the certificate of the %s, or turn tls.certManager on" $kind $kind) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq (include "raftlog.tls.clientAuth" .) "required") (not (include "raftlog.tls.clients" .)) -}}
{{- fail "tls.secrets.clients is empty: with tls.clientAuth=required, or auto without auth.enabled, the jobs of this chart need a certificate as every client does" -}}
{{- end -}}
{{- else if ne .Values.tls.migration "none" -}}
{{- fail (printf "tls.migration is %s, and tls.enabled is false: the nodes would not use TLS; give every upgrade all of tls, or keep it in a values file" .Values.tls.migration) -}}
{{- else if or .Values.tls.certManager.enabled (join "" (values .Values.tls.secrets)) -}}
{{- fail "tls.enabled is false, but certificates are named: the listeners would be plaintext" -}}
{{- end -}}
{{- include "raftlog.auth.check" . -}}
{{- $console := .Values.console -}}
{{- if $console.enabled -}}
{{- if and $console.ingress.enabled (not $console.ingress.host) -}}
{{- fail "console.ingress.host is empty: the console answers only under the names that it knows" -}}
{{- end -}}
{{- if and (include "raftlog.auth.spoken" .) $console.ingress.enabled (not $console.ingress.tls.secret) (not $console.tls.secret) -}}
{{- fail "console.ingress.tls.secret is empty: passwords would travel in plaintext" -}}
{{- end -}}
{{- if $console.certificateLogins -}}
{{- if include "raftlog.auth.spoken" . -}}
{{- fail "console.certificateLogins is true, and with auth.enabled people log in with names and passwords: set console.certificateLogins=false" -}}
{{- end -}}
{{- if not (and (include "raftlog.tls.spoken" .) (eq (include "raftlog.tls.clientAuth" .) "required")) -}}
{{- fail "console.certificateLogins needs brokers that ask clients for certificates: set tls.enabled=true with tls.clientAuth=required (or auto), and complete tls.migration=prepare first" -}}
{{- end -}}
{{- if not (or $console.tls.secret (and $console.ingress.enabled $console.ingress.tls.secret)) -}}
{{- fail "console.certificateLogins is true, and private keys would travel in plaintext: name a Secret with a certificate for https in console.tls.secret, or in console.ingress.tls.secret with console.ingress.enabled" -}}
{{- end -}}
{{- end -}}
{{- else if $console.ingress.enabled -}}
{{- fail "console.ingress.enabled is true, and console.enabled is false" -}}
{{- else if $console.certificateLogins -}}
{{- fail "console.certificateLogins is true, and console.enabled is false: set console.enabled=true, or remove it" -}}
{{- end -}}
{{- if and (not (include "raftlog.separate" .)) (gt $controllers $brokers) -}}
{{- fail (printf "controllers.replicas is %d, but in mode combined only %d pods (brokers.replicas) can have a vote" $controllers $brokers) -}}
{{- end -}}
{{- if gt $rf $brokers -}}
{{- fail (printf "config.default.replication.factor is %d, more than brokers.replicas, %d: no topic could be created" $rf $brokers) -}}
{{- end -}}
{{- if gt $minIsr $rf -}}
{{- fail (printf "config.min.insync.replicas is %d, more than default.replication.factor, %d: writes with acks=all would always be refused" $minIsr $rf) -}}
{{- end -}}
{{- if and (gt $brokers 1) (eq $minIsr $rf) -}}
{{- fail (printf "config.min.insync.replicas equals default.replication.factor, %d: each restart of a broker would refuse writes; leave one replica of slack, such as default.replication.factor=%d" $rf (add $rf 1 | int)) -}}
{{- end -}}
{{- if .Values.podDisruptionBudget.enabled -}}
{{- $down := int .Values.podDisruptionBudget.controllersMaxUnavailable -}}
{{- $survives := div (sub $controllers 1) 2 | int -}}
{{- if and (gt $controllers 1) (gt $down $survives) -}}
{{- fail (printf "podDisruptionBudget.controllersMaxUnavailable is %d, but %d controllers survive the loss of %d only" $down $controllers $survives) -}}
{{- end -}}
{{- $slack := sub $rf $minIsr | int -}}
{{- $down := int .Values.podDisruptionBudget.brokersMaxUnavailable -}}
{{- if and (gt $brokers 1) (gt $down $slack) -}}
{{- fail (printf "podDisruptionBudget.brokersMaxUnavailable is %d, but with default.replication.factor %d and min.insync.replicas %d writes survive the loss of %d only" $down $rf $minIsr $slack) -}}
{{- end -}}
{{- if and (not (include "raftlog.separate" .)) (gt $controllers 1) (gt $down $survives) -}}
{{- fail (printf "podDisruptionBudget.brokersMaxUnavailable is %d, but the pods have the votes as well (mode combined) and %d survive the loss of %d only" $down $controllers $survives) -}}
{{- end -}}
{{- end -}}
{{- if .Values.externalAccess.enabled -}}
{{- $hosts := len .Values.externalAccess.hosts -}}
{{- if eq .Values.externalAccess.type "NodePort" -}}
{{- if ne (len .Values.externalAccess.nodePorts) $brokers -}}
{{- fail (printf "externalAccess.nodePorts has %d ports for %d brokers; name one for each" (len .Values.externalAccess.nodePorts) $brokers) -}}
{{- end -}}
{{- if and .Values.kafka.enabled (ne (len .Values.kafka.externalNodePorts) $brokers) -}}
{{- fail (printf "kafka.externalNodePorts has %d ports for %d brokers; name one for each" (len .Values.kafka.externalNodePorts) $brokers) -}}
{{- end -}}
{{- if and (ne $hosts 1) (ne $hosts $brokers) -}}
{{- fail (printf "externalAccess.hosts has %d names; give one for all brokers, or %d" $hosts $brokers) -}}
{{- end -}}
{{- else if ne $hosts $brokers -}}
{{- fail (printf "externalAccess.hosts has %d names for %d brokers: clients are told an address for each, so reserve one for each load balancer" $hosts $brokers) -}}
{{- end -}}
{{- if and .Values.kafka.enabled (eq (int .Values.externalAccess.port) (int .Values.kafka.externalPort)) -}}
{{- fail (printf "kafka.externalPort and externalAccess.port are both %d: a load balancer has one port for each listener" (int .Values.kafka.externalPort)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.preStop.enabled (ge (int .Values.preStop.timeoutSeconds) (int .Values.terminationGracePeriodSeconds)) -}}
{{- fail (printf "preStop.timeoutSeconds is %d, and the pod is killed after %d (terminationGracePeriodSeconds): leave time for the stop itself" (int .Values.preStop.timeoutSeconds) (int .Values.terminationGracePeriodSeconds)) -}}
{{- end -}}
{{- range $topic := .Values.topics -}}
{{- if gt (int ($topic.replicationFactor | default 1)) $brokers -}}
{{- fail (printf "topic %s: replicationFactor is %d, more than brokers.replicas, %d" $topic.name (int $topic.replicationFactor) $brokers) -}}
{{- end -}}
{{- end -}}
{{- range $key, $value := dict "node.id" "" "cluster.id" "clusterId" "process.roles" "controllers.mode" "log.dirs" "" "listeners" "ports" "advertised.listeners" "externalAccess" "controller.quorum.voters" "controllers.replicas" "inter.node.listener" "ports.nodes" "advertised.inter.node.listener" "" "metrics.listener" "ports.metrics" "metadata.log.dir" "" "rack" "rack.enabled" "insecure" "insecure" "listener.security.protocol" "tls and auth" "listener.security.migration" "tls.migration" "ssl.keystore.location" "tls.secrets" "ssl.keystore.key.location" "tls.secrets" "ssl.truststore.location" "tls.secrets" "ssl.client.auth" "tls.clientAuth" "sasl.enabled.mechanisms" "auth.mechanisms" "sasl.users.location" "auth.admin" "authorizer" "auth.authorizer" "super.users" "auth.superUsers" -}}
{{- range $from, $keys := dict "config" $.Values.config "brokerConfig" $.Values.brokerConfig "controllerConfig" $.Values.controllerConfig -}}
{{- if hasKey $keys $key -}}
{{- fail (printf "%s.%s is set by the chart itself; %s" $from $key (ternary "remove it" (printf "remove it, and set %s in the values" $value) (eq $value ""))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $tables := .Files.Get "files/keys.json" | fromJson -}}
{{- range $from, $keys := dict "config" .Values.config "brokerConfig" .Values.brokerConfig "controllerConfig" .Values.controllerConfig -}}
{{- include "raftlog.config.check" (dict "table" $tables.server "units" $tables.units "where" $from "config" $keys) -}}
{{- end -}}
{{- range $topic := .Values.topics -}}
{{- include "raftlog.config.check" (dict "table" $tables.topic "units" $tables.units "where" (printf "topics: %s: config" $topic.name) "config" ($topic.config | default dict)) -}}
{{- end -}}
{{- end -}}

{{/* Bytes of a size such as 5Gi; empty for spellings with a point or an exponent. */}}
{{- define "raftlog.bytes" -}}
{{- $factors := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- $unit := regexFind "[A-Za-z]*$" (toString .) -}}
{{- if and (regexMatch "^[0-9]+[A-Za-z]*$" (toString .)) (hasKey $factors $unit) -}}
{{- mulf (regexFind "^[0-9]+" (toString .) | float64) (get $factors $unit) | printf "%.0f" -}}
{{- end -}}
{{- end -}}

{{/*
Refuse volumes other than those that a StatefulSet was made with: Kubernetes changes none, and does not say what to do. Only with
a cluster to ask. Arguments: root, name, component (broker, controller), values (.Values.brokers).
*/}}
{{- define "raftlog.volumes.check" -}}
{{- $there := lookup "apps/v1" "StatefulSet" .root.Release.Namespace .name -}}
{{- range $claim := dig "spec" "volumeClaimTemplates" list $there -}}
{{- $class := dig "spec" "storageClassName" "" $claim -}}
{{- $size := dig "spec" "resources" "requests" "storage" "" $claim | toString -}}
{{- $wanted := $.values.storage -}}
{{- $was := include "raftlog.bytes" $size -}}
{{- $is := include "raftlog.bytes" $wanted.size -}}
{{- if or (ne $class $wanted.storageClassName) (and $was $is (ne $was $is)) -}}
{{- fail (printf "%ss.storage: StatefulSet %s was made with size %s and storageClassName %q, and Kubernetes does not change its volumes to %s and %q. Nothing was changed. Give the first values again, or see \"Other volumes\" in the chart's README.md" $.component $.name $size $class (toString $wanted.size) $wanted.storageClassName) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Shell that sets the values that depend on the pod. Arguments: root, base (first node id), headless (service), broker. */}}
{{- define "raftlog.start" -}}
{{- $root := .root -}}
ordinal="${HOSTNAME##*-}"
export RAFTLOG_NODE_ID="$(({{ .base }} + ordinal))"
self="$HOSTNAME.{{ .headless }}.{{ $root.Release.Namespace }}.svc"
{{- if .roles }}
if [ "$ordinal" -lt {{ $root.Values.controllers.replicas }} ]; then
  export RAFTLOG_PROCESS_ROLES=broker,controller
else
  export RAFTLOG_PROCESS_ROLES=broker
fi
{{- end }}
export RAFTLOG_ADVERTISED_INTER_NODE_LISTENER="$self:{{ $root.Values.ports.nodes }}"
{{- if .broker }}
{{- if $root.Values.externalAccess.enabled }}
case "$ordinal" in
{{- range $ordinal := until (int $root.Values.brokers.replicas) }}
{{- $hosts := $root.Values.externalAccess.hosts }}
{{- $host := index $hosts (ternary 0 $ordinal (eq (len $hosts) 1)) }}
{{- $port := $root.Values.externalAccess.port }}
{{- if eq $root.Values.externalAccess.type "NodePort" }}{{ $port = index $root.Values.externalAccess.nodePorts $ordinal }}{{ end }}
{{- $kafka := "" }}
{{- if $root.Values.kafka.enabled }}
{{- $kafkaPort := $root.Values.kafka.externalPort }}
{{- if eq $root.Values.externalAccess.type "NodePort" }}{{ $kafkaPort = index $root.Values.kafka.externalNodePorts $ordinal }}{{ end }}
{{- $kafka = printf ",%s://%s:%d" (include "raftlog.kafka.protocol" $root) $host (int $kafkaPort) }}
{{- end }}
{{ $ordinal }}) export RAFTLOG_ADVERTISED_LISTENERS="{{ $host }}:{{ $port }}{{ $kafka }}" ;;
{{- end }}
esac
{{- else }}
export RAFTLOG_ADVERTISED_LISTENERS="$self:{{ $root.Values.ports.clients }}{{ if $root.Values.kafka.enabled }},{{ include "raftlog.kafka.protocol" $root }}://$self:{{ $root.Values.ports.kafka }}{{ end }}"
{{- end }}
{{- if $root.Values.rack.enabled }}
export RAFTLOG_RACK="$(cat /run/raftlog/rack)"
{{- end }}
{{- end }}
export -p > /run/raftlog/environment
exec raftlog server --config /etc/raftlog/server.toml
{{- end -}}
