{{/* Users. `raftlog.auth.spoken`: the chart's own clients log in, which they do not while auth is being prepared. */}}
{{- define "raftlog.auth.spoken" -}}
{{- if and .Values.auth.enabled (eq .Values.auth.migration "none") }}true{{ end -}}
{{- end -}}

{{/* The protocol of the listener for Kafka clients. */}}
{{- define "raftlog.kafka.protocol" -}}
{{- if include "raftlog.auth.spoken" . }}kafka+sasl+ssl{{ else if include "raftlog.tls.spoken" . }}kafka+ssl{{ else }}kafka{{ end -}}
{{- end -}}

{{- define "raftlog.auth.acl" -}}
{{- if eq .Values.auth.authorizer "acl" }}true{{ end -}}
{{- end -}}

{{/* The users of the chart's own clients, by certificate and by password; as a JSON list. */}}
{{- define "raftlog.auth.own" -}}
{{- $own := list -}}
{{- if .Values.auth.admin.user -}}
{{- $own = append $own (printf "User:%s" .Values.auth.admin.user) -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not (include "raftlog.auth.spoken" .)) -}}
{{- $own = append $own (printf "User:%s-client" (include "raftlog.fullname" .)) -}}
{{- end -}}
{{- toJson $own -}}
{{- end -}}

{{/* Whether a client presents a certificate: required or none. */}}
{{- define "raftlog.tls.clientAuth" -}}
{{- if ne .Values.tls.clientAuth "auto" -}}
{{- .Values.tls.clientAuth -}}
{{- else -}}
{{- ternary "none" "required" (eq (include "raftlog.auth.spoken" .) "true") -}}
{{- end -}}
{{- end -}}

{{/* Server keys of brokers, as JSON. */}}
{{- define "raftlog.auth.keys" -}}
{{- $keys := dict -}}
{{- if .Values.auth.enabled -}}
{{- $keys = merge $keys (dict "sasl.enabled.mechanisms" (ternary (append .Values.auth.mechanisms "PLAIN") .Values.auth.mechanisms .Values.kafka.plain) "sasl.users.location" "/etc/raftlog-admin") -}}
{{- end -}}
{{- if include "raftlog.auth.spoken" . -}}
{{- $_ := set $keys "listener.security.protocol" "sasl_ssl" -}}
{{- end -}}
{{- if include "raftlog.auth.acl" . -}}
{{- $super := concat (include "raftlog.auth.own" . | fromJsonArray) .Values.auth.superUsers | uniq -}}
{{- $keys = merge $keys (dict "authorizer" "acl" "super.users" (join ";" $super)) -}}
{{- end -}}
{{- toJson $keys -}}
{{- end -}}

{{/* The volume of the admin's password: a file with the user's name, for brokers and for clients. */}}
{{- define "raftlog.auth.volume" -}}
- name: admin
  secret:
    secretName: {{ .Values.auth.admin.secret }}
    items: [{key: {{ .Values.auth.admin.key | quote }}, path: {{ .Values.auth.admin.user | quote }}}]
    defaultMode: 0440
{{- end -}}
{{- define "raftlog.auth.mount" -}}
- {name: admin, mountPath: /etc/raftlog-admin, readOnly: true}
{{- end -}}

{{/* Settings of the chart's own clients, as JSON: keys of docs/python.md. Arguments: root, certificate. */}}
{{- define "raftlog.client.settings" -}}
{{- $root := .root -}}
{{- $settings := dict -}}
{{- if include "raftlog.tls.spoken" $root -}}
{{- $settings = merge $settings (dict "security.protocol" "ssl" "ssl.ca.location" "/etc/raftlog-tls/ca.crt") -}}
{{- if .certificate -}}
{{- $settings = merge $settings (dict "ssl.certificate.location" "/etc/raftlog-tls/tls.crt" "ssl.key.location" "/etc/raftlog-tls/tls.key") -}}
{{- end -}}
{{- end -}}
{{- if include "raftlog.auth.spoken" $root -}}
{{- $admin := $root.Values.auth.admin.user -}}
{{- $settings = merge (dict
  "security.protocol" "sasl_ssl"
  "sasl.mechanism" (first $root.Values.auth.mechanisms)
  "sasl.username" $admin
  "sasl.password.location" (printf "/etc/raftlog-admin/%s" $admin)) $settings -}}
{{- end -}}
{{- toJson $settings -}}
{{- end -}}

{{/* A client job's environment, mounts and volumes. */}}
{{- define "raftlog.client.env" -}}
- {name: RAFTLOG_BOOTSTRAP, value: {{ include "raftlog.bootstrap" . | quote }}}
{{- $settings := include "raftlog.client.settings" (dict "root" . "certificate" (include "raftlog.tls.clients" .)) | fromJson }}
{{- range $key, $value := $settings }}
- {name: RAFTLOG_{{ $key | upper | replace "." "_" }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}
{{- define "raftlog.client.mounts" -}}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/raftlog-tls, readOnly: true}
{{- end }}
{{- if include "raftlog.auth.spoken" . }}
{{ include "raftlog.auth.mount" . }}
{{- end }}
{{- end -}}
{{- define "raftlog.client.volumes" -}}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    {{- if include "raftlog.tls.clients" . }}
    secretName: {{ include "raftlog.tls.clients" . }}
    {{- else }}
    secretName: {{ include "raftlog.tls.brokers" . }}
    items: [{key: ca.crt, path: ca.crt}]
    {{- end }}
    defaultMode: 0440
{{- end }}
{{- if include "raftlog.auth.spoken" . }}
{{ include "raftlog.auth.volume" . }}
{{- end }}
{{- end -}}

{{/* Refusals: users that cannot log in, and permissions without effect. */}}
{{- define "raftlog.auth.check" -}}
{{- $auth := .Values.auth -}}
{{- if and .Values.kafka.plain (not (and .Values.kafka.enabled $auth.enabled)) -}}
{{- fail "kafka.plain is true, and Kafka clients need no password: it needs kafka.enabled and auth.enabled" -}}
{{- end -}}
{{- if $auth.enabled -}}
{{- if not .Values.tls.enabled -}}
{{- fail "auth.enabled needs tls.enabled: clients log in over TLS only (listener.security.protocol=sasl_ssl)" -}}
{{- end -}}
{{- if ne .Values.tls.migration "none" -}}
{{- fail (printf "auth.enabled while tls.migration is %s: plaintext is still accepted, and has no users; end that migration first" .Values.tls.migration) -}}
{{- end -}}
{{- if not (and $auth.admin.user $auth.admin.secret) -}}
{{- fail "auth.admin.user and auth.admin.secret are needed: the user that the chart's jobs and preStop log in as, and the Secret with its password" -}}
{{- end -}}
{{- if eq (first $auth.mechanisms) "OAUTHBEARER" -}}
{{- fail "auth.mechanisms begins with OAUTHBEARER: the chart's own clients use the first mechanism, with a password; put a SCRAM mechanism before it" -}}
{{- end -}}
{{- if has "OAUTHBEARER" $auth.mechanisms -}}
{{- $config := merge (dict) .Values.brokerConfig .Values.config -}}
{{- range $key := list "sasl.oauthbearer.jwks.endpoint.url" "sasl.oauthbearer.expected.issuer" "sasl.oauthbearer.expected.audience" -}}
{{- if not (get $config $key) -}}
{{- fail (printf "auth.mechanisms has OAUTHBEARER, so brokerConfig.%s has to be set: without it no broker would start" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $user := .Values.users -}}
{{- if eq $user.name $auth.admin.user -}}
{{- fail (printf "users: %s is auth.admin, which brokers know already; two passwords could differ" $user.name) -}}
{{- end -}}
{{- if and $user.mechanism (not (has $user.mechanism $auth.mechanisms)) -}}
{{- fail (printf "users: %s has mechanism %s, which is not one of auth.mechanisms (%s): it could never log in" $user.name $user.mechanism (join ", " $auth.mechanisms)) -}}
{{- end -}}
{{- end -}}
{{- else if ne $auth.migration "none" -}}
{{- fail (printf "auth.migration is %s, and auth.enabled is false: give every upgrade all of auth, or keep it in a values file" $auth.migration) -}}
{{- else if $auth.admin.secret -}}
{{- fail "auth.admin.secret is named, and auth.enabled is false: clients would need no password" -}}
{{- end -}}
{{- if include "raftlog.auth.acl" . -}}
{{- $certified := and .Values.tls.enabled (eq .Values.tls.migration "none") (eq (include "raftlog.tls.clientAuth" .) "required") -}}
{{- if not (or $certified (include "raftlog.auth.spoken" .)) -}}
{{- fail "auth.authorizer=acl needs users, and would refuse every client: have clients log in (auth.enabled with auth.migration=none), or present certificates (tls.enabled with tls.clientAuth=required and tls.migration=none)" -}}
{{- end -}}
{{- if eq (include "raftlog.auth.own" .) "[]" -}}
{{- fail "auth.admin.user is empty: with auth.authorizer=acl it is the common name of the certificate in tls.secrets.clients, with which the chart's jobs may do everything" -}}
{{- end -}}
{{- else if $auth.superUsers -}}
{{- fail "auth.superUsers are named, and auth.authorizer is none: every client may do everything" -}}
{{- else if .Values.acls -}}
{{- fail "acls are listed, and auth.authorizer is none: every client may do everything, and brokers accept no ACLs" -}}
{{- end -}}
{{- $names := list -}}
{{- range $user := .Values.users -}}
{{- if has $user.name $names -}}
{{- fail (printf "users: %s is named twice" $user.name) -}}
{{- end -}}
{{- $names = append $names $user.name -}}
{{- end -}}
{{- $operations := dict
  "topic" (list "All" "Read" "Write" "Create" "Describe" "Delete" "Alter" "DescribeConfigs" "AlterConfigs")
  "group" (list "All" "Read" "Describe" "Delete")
  "cluster" (list "All" "Create" "ClusterAction" "DescribeConfigs" "AlterConfigs" "IdempotentWrite" "Alter" "Describe")
  "transactional-id" (list "All" "Describe" "Write") -}}
{{- range $acl := .Values.acls -}}
{{- range $operation := $acl.operations -}}
{{- if not (has $operation (get $operations $acl.resource.type)) -}}
{{- fail (printf "acls: one of %s has %s, but a %s has only %s" $acl.principal $operation $acl.resource.type (get $operations $acl.resource.type | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $acl.resource.type "cluster") (or $acl.resource.name $acl.resource.pattern) -}}
{{- fail (printf "acls: one of %s names the cluster, of which there is one: leave resource.name and resource.pattern out" $acl.principal) -}}
{{- end -}}
{{- if and (ne $acl.resource.type "cluster") (not $acl.resource.name) -}}
{{- fail (printf "acls: one of %s has no resource.name: name the %s, or \"*\" for every one" $acl.principal $acl.resource.type) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.job.pruneAcls (not .Values.acls) -}}
{{- fail "job.pruneAcls with no acls would remove every ACL of the cluster; raftlog acl remove does that" -}}
{{- end -}}
{{- end -}}
