{{/* The files of a set's ConfigMap, as JSON. Arguments: root, component (broker, controller). */}}
{{- define "raftlog.config" -}}
{{- $component := .component -}}
{{- with .root -}}
{{- $common := dict
  "cluster.id" (include "raftlog.clusterId" .)
  "insecure" .Values.insecure
  "controller.quorum.voters" (include "raftlog.voters" . | fromJsonArray)
  "log.dirs" (list "/var/lib/raftlog/data")
  "inter.node.listener" (printf "0.0.0.0:%d" (int .Values.ports.nodes))
  "metrics.listener" (printf "0.0.0.0:%d" (int .Values.ports.metrics)) -}}
{{- if .Values.tls.enabled -}}
{{- $common = merge $common (dict
  "listener.security.protocol" (ternary "plaintext" "ssl" (eq .Values.tls.migration "prepare"))
  "listener.security.migration" (ne .Values.tls.migration "none")
  "ssl.client.auth" (include "raftlog.tls.clientAuth" .)
  "ssl.keystore.location" "/etc/raftlog-tls/tls.crt"
  "ssl.keystore.key.location" "/etc/raftlog-tls/tls.key"
  "ssl.truststore.location" "/etc/raftlog-tls/ca.crt") -}}
{{- end -}}
{{- $files := dict -}}
{{- if eq $component "broker" -}}
{{- $broker := dict "listeners" (list (printf "0.0.0.0:%d" (int .Values.ports.clients))) -}}
{{- if .Values.kafka.enabled }}{{ $_ := set $broker "listeners" (append $broker.listeners (printf "%s://0.0.0.0:%d" (include "raftlog.kafka.protocol" .) (int .Values.ports.kafka))) }}{{ end -}}
{{- if include "raftlog.separate" . }}{{ $_ := set $broker "process.roles" (list "broker") }}{{ end -}}
{{- $_ := set $files "server.toml" (include "raftlog.toml" (merge (include "raftlog.auth.keys" . | fromJson) $broker $common .Values.brokerConfig .Values.config)) -}}
{{- if include "raftlog.tls.spoken" . -}}
{{- $_ := set $files "client.toml" (include "raftlog.toml" (include "raftlog.client.settings" (dict "root" . "certificate" true) | fromJson)) -}}
{{- end -}}
{{- else -}}
{{- $_ := set $files "server.toml" (include "raftlog.toml" (merge (dict "process.roles" (list "controller")) $common .Values.controllerConfig .Values.config)) -}}
{{- end -}}
{{- toJson $files -}}
{{- end -}}
{{- end -}}
