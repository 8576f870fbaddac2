{{- /* Name of everything. With what is appended, and what KubeRay appends, it stays within every limit (34 + "-batch-" +
6 = 47); where the end is cut off, a hash keeps two long names apart. DNS-1035: a letter first, no dots. */ -}}
{{- define "headwater.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- $full = replace "." "-" $full -}}
{{- if not (regexMatch "^[a-z]" $full) }}{{ $full = printf "hw-%s" $full }}{{ end -}}
{{- if gt (len $full) 34 }}{{ $full = printf "%s-%s" ($full | trunc 25 | trimSuffix "-") ($full | sha256sum | trunc 8) }}{{ end -}}
{{- $full -}}
{{- end -}}

{{- /* Labels that select. Pod templates have no others of ours: KubeRay compares templates, and a chart's version in
them would look like a change. */ -}}
{{- define "headwater.selector" -}}
app.kubernetes.io/name: headwater
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "headwater.podLabels" -}}
{{ include "headwater.selector" .root }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: headwater
{{- end -}}

{{- define "headwater.labels" -}}
{{ include "headwater.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "headwater.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{- define "headwater.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "headwater.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- /* The URL of Ray's job server on the head node; KubeRay names the Service. */ -}}
{{- define "headwater.jobServer" -}}
http://{{ include "headwater.fullname" . }}-head-svc:8265
{{- end -}}

{{- /* Bytes of a quantity (8Gi, 500M) or of a size as Headwater writes it (8GiB, 500 MB). */ -}}
{{- define "headwater.bytes" -}}
{{- $text := ternary (int64 .) . (kindIs "float64" .) | toString | replace " " "" | trimSuffix "B" -}}
{{- $number := regexFind "^[0-9.]+" $text | float64 -}}
{{- $units := dict "" 1 "k" 1e3 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := regexReplaceAll "^[0-9.]+" $text "" -}}
{{- if not (hasKey $units $unit) }}{{ fail (printf "%v is not a size; write for example 8Gi" .) }}{{ end -}}
{{- mulf $number (get $units $unit | float64) | int64 -}}
{{- end -}}

{{- /* All groups of workers with their defaults, as YAML. */ -}}
{{- define "headwater.groups" -}}
{{- $groups := dict -}}
{{- range $name, $group := .Values.workers -}}
{{- if $group -}}
{{- $_ := set $groups $name (mustMergeOverwrite (deepCopy $.Values.workerDefaults) (deepCopy $group)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $groups -}}
{{- end -}}

{{- /* Resources of a container: GPUs and RDMA devices stand in requests and limits, as whole numbers. */ -}}
{{- define "headwater.resources" -}}
{{- $resources := deepCopy .group.resources -}}
{{- $devices := dict -}}
{{- with .group.gpu }}{{ $_ := set $devices "nvidia.com/gpu" (int . | toString) }}{{ end -}}
{{- if .rdma }}{{ $_ := set $devices .root.Values.kvTransfer.rdma.resource (int .root.Values.kvTransfer.rdma.count | toString) }}{{ end -}}
{{- range $kind := list "requests" "limits" -}}
{{- $_ := set $resources $kind (merge (deepCopy $devices) (default (dict) (get $resources $kind))) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- /* What Ray's processes and clients need to be let in; KubeRay sets the same in the pods that it makes. */ -}}
{{- define "headwater.rayAuth" -}}
{{- if .Values.ray.auth.enabled -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ default (include "headwater.fullname" .) .Values.ray.auth.existingSecret }}
      key: auth_token
{{- end -}}
{{- end -}}

{{- define "headwater.podSecurity" -}}
fsGroup: {{ int .Values.securityContext.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- /* With `root` the process may lock the memory that an RDMA device reads; otherwise nobody is root. */ -}}
{{- define "headwater.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
{{- if .asRoot }}
runAsUser: 0
runAsNonRoot: false
capabilities:
  drop: [ALL]
  add: [IPC_LOCK]
{{- else }}
runAsUser: {{ int .root.Values.securityContext.runAsUser }}
runAsGroup: {{ int .root.Values.securityContext.runAsGroup }}
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}
{{- end -}}
