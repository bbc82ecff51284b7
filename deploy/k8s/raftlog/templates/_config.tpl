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

{{/*
Refuse a key or a value that the servers would refuse. files/keys.json is generated from the keys that the server declares.
Arguments: table (of keys.json), units (of keys.json), where (for messages), config.
*/}}
{{- define "raftlog.config.check" -}}
{{- $keys := .table.keys -}}
{{- range $name, $value := .config -}}
{{- $place := printf "%s.%s" $.where $name -}}
{{- $key := get $keys $name -}}
{{- if kindIs "map" $value -}}
{{- $path := list $name -}}
{{- range until 8 -}}
{{- if kindIs "map" $value }}{{ $first := keys $value | sortAlpha | first }}{{ $path = append $path $first }}{{ $value = get $value $first }}{{ end -}}
{{- end -}}
{{- fail (printf "%s is a table, but a key is one name with dots: write \"%s\", and with --set each of its dots as \\." $place (join "." $path)) -}}
{{- else if not $key -}}
{{- $dotted := $name | replace "_" "." -}}
{{- $remedy := "docs/configuration.md lists all keys" -}}
{{- $words := splitList "." $dotted -}}
{{- $near := list -}}
{{- range $count := until (len $words) -}}
{{- $prefix := printf "%s." (slice $words 0 $count | join ".") -}}
{{- $found := list -}}
{{- range $each, $_ := $keys }}{{ if hasPrefix $prefix $each }}{{ $found = append $found $each }}{{ end }}{{ end -}}
{{- if $found }}{{ $near = $found }}{{ end -}}
{{- end -}}
{{- if get $.table.instead $dotted -}}
{{- $remedy = get $.table.instead $dotted -}}
{{- else if hasKey $keys $dotted -}}
{{- $remedy = printf "write it with dots, as %s" $dotted -}}
{{- else if and $near (le (len $near) 8) -}}
{{- $remedy = printf "%s; the nearest are %s" $remedy (sortAlpha $near | join ", ") -}}
{{- end -}}
{{- fail (printf "%s: unknown %s; %s" $place $.table.what $remedy) -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- $text := ternary (join "," $value) (toString $value) (kindIs "slice" $value) -}}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) }}{{ $text = printf "%.0f" $value }}{{ end -}}
{{- $wrong := or (and $key.form (not (regexMatch $key.form $text))) (and (has $key.kind (list "string" "list")) (not (or (kindIs "string" $value) (kindIs "slice" $value)))) (and (kindIs "slice" $value) (ne $key.kind "list")) -}}
{{- if and (not $wrong) (or $key.minimum $key.maximum) -}}
{{- $number := trim $text | float64 -}}
{{- if ne $key.kind "float" -}}
{{- $unit := regexFind "[A-Za-z]+" $text -}}
{{- $number = regexFind "[+-]?[0-9]+" $text | float64 -}}
{{- if $unit }}{{ $number = mulf $number (get (get $.units $key.kind) $unit) }}{{ end -}}
{{- end -}}
{{- $wrong = or (and $key.minimum (lt $number (float64 $key.minimum))) (and $key.maximum (gt $number (float64 $key.maximum))) -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "%s=%s: expected %s" $place $text $key.expected) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
