{{/* A StatefulSet. Arguments: root, name, component (broker, controller), values (.Values.brokers), base, roles, broker */}}
{{- define "raftlog.statefulset" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- include "raftlog.volumes.check" . -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ .name }}
  labels: {{- include "raftlog.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  serviceName: {{ .name }}
  replicas: {{ $values.replicas }}
  # All at once: a quorum needs a majority before any pod is ready. Updates still go one by one.
  podManagementPolicy: Parallel
  updateStrategy:
    type: RollingUpdate
    rollingUpdate: {partition: {{ $values.partition }}}
  minReadySeconds: 5
  persistentVolumeClaimRetentionPolicy: {{- toYaml $root.Values.persistentVolumeClaimRetentionPolicy | nindent 4 }}
  selector:
    matchLabels: {{- include "raftlog.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ .component }}
  template:
    metadata:
      # No chart version here: a new chart that changes nothing for the pods leaves them alone.
      labels: {{- include "raftlog.selector" $root | nindent 8 }}
        app.kubernetes.io/component: {{ .component }}
        {{- with $values.podLabels }}{{ toYaml . | nindent 8 }}{{ end }}
      annotations:
        # Of this set's files only: the ConfigMap's labels change with every chart version.
        checksum/config: {{ include "raftlog.config" (dict "root" $root "component" .component) | sha256sum }}
        {{- with $values.podAnnotations }}{{ toYaml . | nindent 8 }}{{ end }}
    spec:
      serviceAccountName: {{ include "raftlog.serviceAccount" $root }}
      automountServiceAccountToken: {{ and .broker $root.Values.rack.enabled }}
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ $root.Values.terminationGracePeriodSeconds }}
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      {{- with $values.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 8 }}
      {{- if ne $root.Values.affinity.antiAffinity "none" }}
      affinity:
        podAntiAffinity:
          {{- $labels := printf "%s\napp.kubernetes.io/component: %s" (include "raftlog.selector" $root) .component | fromYaml }}
          {{- $term := dict "topologyKey" $root.Values.affinity.topologyKey "labelSelector" (dict "matchLabels" $labels) }}
          {{- if eq $root.Values.affinity.antiAffinity "hard" }}
          requiredDuringSchedulingIgnoredDuringExecution: {{- list $term | toYaml | nindent 12 }}
          {{- else }}
          preferredDuringSchedulingIgnoredDuringExecution: {{- list (dict "weight" 100 "podAffinityTerm" $term) | toYaml | nindent 12 }}
          {{- end }}
      {{- end }}
      {{- if $root.Values.topologySpreadConstraints.enabled }}
      topologySpreadConstraints:
        - maxSkew: {{ $root.Values.topologySpreadConstraints.maxSkew }}
          topologyKey: {{ $root.Values.topologySpreadConstraints.topologyKey }}
          whenUnsatisfiable: {{ $root.Values.topologySpreadConstraints.whenUnsatisfiable }}
          labelSelector:
            matchLabels: {{- include "raftlog.selector" $root | nindent 14 }}
              app.kubernetes.io/component: {{ .component }}
      {{- end }}
      {{- if and .broker $root.Values.rack.enabled }}
      initContainers:
        - name: rack
          image: {{ include "raftlog.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: [/opt/raftlog/bin/python, -c]
          args: [{{ $root.Files.Get "files/rack.py" | toJson }}]
          env:
            - name: NODE_NAME
              valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
            - {name: NODE_LABEL, value: {{ $root.Values.rack.nodeLabel | quote }}}
          securityContext: {{- toYaml $root.Values.containerSecurityContext | nindent 12 }}
          resources: {{- toYaml $root.Values.job.resources | nindent 12 }}
          volumeMounts:
            - {name: run, mountPath: /run/raftlog}
      {{- end }}
      containers:
        - name: raftlog
          image: {{ include "raftlog.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: [/bin/sh, -ec]
          args:
            - | {{- include "raftlog.start" . | nindent 14 }}
          ports:
            {{- if .broker }}
            - {name: clients, containerPort: {{ $root.Values.ports.clients }}}
            {{- if $root.Values.kafka.enabled }}
            - {name: kafka, containerPort: {{ $root.Values.ports.kafka }}}
            {{- end }}
            {{- end }}
            - {name: nodes, containerPort: {{ $root.Values.ports.nodes }}}
            - {name: metrics, containerPort: {{ $root.Values.ports.metrics }}}
          startupProbe: {{- merge (dict "httpGet" (dict "path" "/startupz" "port" "metrics")) $root.Values.probes.startup | toYaml | nindent 12 }}
          readinessProbe: {{- merge (dict "httpGet" (dict "path" "/readyz" "port" "metrics")) $root.Values.probes.readiness | toYaml | nindent 12 }}
          livenessProbe: {{- merge (dict "httpGet" (dict "path" "/livez" "port" "metrics")) $root.Values.probes.liveness | toYaml | nindent 12 }}
          {{- if and .broker $root.Values.preStop.enabled }}
          lifecycle:
            preStop:
              exec:
                # SIGTERM, which comes next in any case, hands over the remaining leaderships.
                command:
                  - /bin/sh
                  - -ec
                  - >-
                    . /run/raftlog/environment;
                    exec raftlog broker drain --self --config /etc/raftlog/server.toml --until-restart
                    {{- if include "raftlog.tls.spoken" $root }} --client-config /etc/raftlog/client.toml{{ end }}
                    --timeout {{ $root.Values.preStop.timeoutSeconds }}
          {{- end }}
          securityContext: {{- toYaml $root.Values.containerSecurityContext | nindent 12 }}
          resources: {{- toYaml $values.resources | nindent 12 }}
          volumeMounts:
            - {name: data, mountPath: /var/lib/raftlog}
            - {name: config, mountPath: /etc/raftlog, readOnly: true}
            - {name: run, mountPath: /run/raftlog}
            - {name: tmp, mountPath: /tmp}
            {{- if $root.Values.tls.enabled }}
            - {name: tls, mountPath: /etc/raftlog-tls, readOnly: true}
            {{- end }}
            {{- if and .broker $root.Values.auth.enabled }}
            {{- include "raftlog.auth.mount" $root | nindent 12 }}
            {{- end }}
      volumes:
        {{- if $root.Values.tls.enabled }}
        - name: tls
          secret: {secretName: {{ include (printf "raftlog.tls.%ss" .component) $root }}, defaultMode: 0440}
        {{- end }}
        {{- if and .broker $root.Values.auth.enabled }}
        {{- include "raftlog.auth.volume" $root | nindent 8 }}
        {{- end }}
        - name: config
          configMap: {name: {{ .name }}}
        - name: run
          emptyDir: {}
        - name: tmp
          emptyDir: {}
  volumeClaimTemplates:
    - apiVersion: v1
      kind: PersistentVolumeClaim
      metadata:
        name: data
        labels: {{- include "raftlog.selector" $root | nindent 10 }}
          app.kubernetes.io/component: {{ .component }}
      spec:
        accessModes: {{- toYaml $values.storage.accessModes | nindent 10 }}
        {{- with $values.storage.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources: {requests: {storage: {{ $values.storage.size }}}}
{{- end -}}
