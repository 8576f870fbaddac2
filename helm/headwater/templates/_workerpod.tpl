{{- /* The pod template of the head, of gateways and of workers: one program in one image. `component` says what it is,
`group` what it needs; `drain` and `linger`, in seconds, how long it may take to end. */ -}}
{{- define "headwater.pod" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- $worker := and (ne .component "head") (ne .component "gateway") -}}
{{- $fronting := not $worker -}}
{{- $rdma := and $worker $root.Values.kvTransfer.rdma.enabled -}}
{{- $asRoot := and $rdma (eq $root.Values.kvTransfer.rdma.memlock "root") -}}
metadata:
  labels: {{- include "headwater.podLabels" (dict "root" $root "component" .component) | nindent 4 }}
  {{- if eq .component "head" }}
  annotations:
    cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
  {{- end }}
spec:
  enableServiceLinks: false
  {{- if and (eq .component "head") $root.Values.ray.autoscaler.enabled }}
  {{- /* KubeRay makes an account for it that may change this cluster, and its autoscaler needs the token. */}}
  automountServiceAccountToken: true
  {{- else }}
  serviceAccountName: {{ include "headwater.serviceAccount" $root }}
  automountServiceAccountToken: false
  {{- end }}
  {{- if .drain }}
  terminationGracePeriodSeconds: {{ include "headwater.grace" . }}
  {{- end }}
  securityContext: {{- include "headwater.podSecurity" $root | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
  {{- with get $group $key }}
  {{ $key }}: {{- if kindIs "string" . }} {{ . }}{{ else }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  {{- end }}
  containers:
    - name: ray-{{ ternary "head" "worker" (eq .component "head") }}
      image: {{ include "headwater.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext: {{- include "headwater.containerSecurity" (dict "root" $root "asRoot" $asRoot) | nindent 8 }}
      resources: {{- include "headwater.resources" (dict "root" $root "group" $group "rdma" $rdma) | nindent 8 }}
      env: {{- include "headwater.env" . | nindent 8 }}
      {{- with include "headwater.ports" . }}
      {{- . | nindent 6 }}
      {{- end }}
      {{- with include "headwater.lifecycle" . }}
      {{- . | nindent 6 }}
      {{- end }}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        - {name: home, mountPath: /home/headwater}
        - {name: config, mountPath: /etc/headwater, readOnly: true}
        - {name: cache, mountPath: /var/cache/headwater}
        {{- if and $worker (include "headwater.hasDisk" $root) }}
        - {name: blocks, mountPath: /var/lib/headwater/blocks}
        {{- end }}
        {{- if and $fronting $root.Values.gateway.apiKeys.existingSecret }}
        - {name: keys, mountPath: /etc/headwater-keys, readOnly: true}
        {{- end }}
        {{- if and $fronting $root.Values.gateway.tls.existingSecret }}
        - {name: tls, mountPath: /etc/headwater-tls, readOnly: true}
        {{- end }}
        {{- if and (eq .component "gateway") $root.Values.gateway.batches.existingClaim }}
        - {name: batches, mountPath: /var/lib/headwater/batches}
        {{- end }}
        {{- if and (eq .component "head") $root.Values.batch.existingClaim }}
        - {name: batch, mountPath: /data}
        {{- end }}
  volumes: {{- include "headwater.volumes" (dict "root" $root "group" $group "component" .component "worker" $worker) | nindent 4 }}
{{- end -}}

{{- define "headwater.grace" -}}
{{- add (int .linger) (int .drain) 60 -}}
{{- end -}}

{{- define "headwater.hasDisk" -}}
{{- if ne (toString .Values.tiers.disk) "0" }}yes{{ end -}}
{{- end -}}

{{- define "headwater.env" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: HOME
  value: /home/headwater
- name: HEADWATER_CACHE
  value: /var/cache/headwater
- name: HF_HOME
  value: /var/cache/headwater/hub
{{- with .root.Values.model.hfToken.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.root.Values.model.hfToken.key }}
{{- end }}
{{- if eq .component "head" }}
{{- with .root.Values.gossip.existingSecret }}
- name: HEADWATER__GOSSIP__KEY
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.root.Values.gossip.key }}
{{- end }}
{{- end }}
{{- with include "headwater.rayAuth" .root }}
{{ . }}
{{- end }}
{{- with .root.Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "headwater.ports" -}}
{{- if eq .component "head" -}}
ports:
  - {name: gcs-server, containerPort: 6379}
  - {name: dashboard, containerPort: 8265}
  - {name: client, containerPort: 10001}
{{- else if eq .component "gateway" -}}
ports:
  - {name: http, containerPort: {{ int .root.Values.gateway.port }}}
{{- else -}}
ports:
  - {name: metrics, containerPort: {{ int .root.Values.monitoring.workerPort }}}
{{- end -}}
{{- end -}}

{{- /* Nothing but a node of Ray runs on the head, and KubeRay's probes look at that. Elsewhere ours do: alive is a pod
whose node of Ray is, however long a model takes to load; ready is what serves. */ -}}
{{- define "headwater.lifecycle" -}}
{{- if ne .component "head" -}}
lifecycle:
  preStop:
    exec:
      {{- /* A shell: $(POD_IP) is not replaced here. First the gateway's address goes from all lists, then it drains. */}}
      command:
        - /bin/sh
        - -c
        - {{ printf "sleep %d; timeout %d headwater drain --node \"$POD_IP\" || true" (int .linger) (add (int .drain) 30) | quote }}
livenessProbe:
  httpGet: {path: /api/local_raylet_healthz, port: 52365}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 30
{{- if eq .component "gateway" }}
startupProbe:
  httpGet: {path: /api/local_raylet_healthz, port: 52365}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 120
readinessProbe:
  httpGet:
    path: /ready
    port: http
    {{- if .root.Values.gateway.tls.existingSecret }}
    scheme: HTTPS
    {{- end }}
  periodSeconds: 3
  timeoutSeconds: 3
  failureThreshold: 2
{{- else }}
startupProbe:
  exec:
    command: [python, /etc/headwater/serving.py]
  periodSeconds: 20
  timeoutSeconds: 20
  failureThreshold: {{ max 1 (div (int .group.startupSeconds) 20) }}
readinessProbe:
  exec:
    command: [/bin/sh, -c, "grep -aqs '^ray::Worker' /proc/[0-9]*/cmdline"]
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}
{{- end -}}
{{- end -}}

{{- define "headwater.volumes" -}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .group.shmSize }}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
- name: config
  configMap: {name: {{ include "headwater.fullname" .root }}}
- name: cache
  {{- if or .root.Values.model.cache.existingClaim .root.Values.model.cache.size }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" (include "headwater.fullname" .root)) .root.Values.model.cache.existingClaim }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- if and .worker (include "headwater.hasDisk" .root) }}
- name: blocks
  {{- if .root.Values.tiers.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .root.Values.tiers.existingClaim }}
  {{- else if .root.Values.tiers.storageClass }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        storageClassName: {{ .root.Values.tiers.storageClass }}
        resources:
          requests:
            storage: {{ include "headwater.diskRoom" .root | quote }}
  {{- else }}
  emptyDir: {sizeLimit: {{ include "headwater.diskRoom" .root | quote }}}
  {{- end }}
{{- end }}
{{- if and (not .worker) .root.Values.gateway.apiKeys.existingSecret }}
- name: keys
  secret:
    secretName: {{ .root.Values.gateway.apiKeys.existingSecret }}
{{- end }}
{{- if and (not .worker) .root.Values.gateway.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ .root.Values.gateway.tls.existingSecret }}
{{- end }}
{{- if and (eq .component "gateway") .root.Values.gateway.batches.existingClaim }}
- name: batches
  persistentVolumeClaim:
    claimName: {{ .root.Values.gateway.batches.existingClaim }}
{{- end }}
{{- if and (eq .component "head") .root.Values.batch.existingClaim }}
- name: batch
  persistentVolumeClaim:
    claimName: {{ .root.Values.batch.existingClaim }}
{{- end }}
{{- end -}}

{{- /* A tenth more than the blocks may take: file systems need some for themselves. */ -}}
{{- define "headwater.diskRoom" -}}
{{- mulf (include "headwater.bytes" .Values.tiers.disk | float64) 1.1 | int64 -}}
{{- end -}}
