{{- /* Headwater's configuration file: `config`, and what other values say. */ -}}
{{- define "headwater.config" -}}
{{- $groups := include "headwater.groups" . | fromYaml -}}
{{- $own := dict "model" (dict "name" .Values.model.name) -}}
{{- range $role := list "prefill" "decode" "both" -}}
{{- $replicas := 0 -}}
{{- $resources := dict $role 1 -}}
{{- range $groups -}}
{{- if eq .role $role -}}
{{- $replicas = add $replicas (int .replicas) -}}
{{- with .gpu }}{{ $_ := set $resources "GPU" (int .) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $section := dict "replicas" (int $replicas) -}}
{{- if $replicas }}{{ $_ := set $section "resources" $resources }}{{ end -}}
{{- $_ := set $own $role $section -}}
{{- end -}}
{{- $gateway := dict "replicas" (int .Values.gateway.replicas) "host" "0.0.0.0" "same_port" true "port" (int .Values.gateway.port) "drain_s" (int .Values.gateway.drainSeconds) "resources" (dict "gateway" 1) -}}
{{- if .Values.gateway.apiKeys.existingSecret }}{{ $_ := set $gateway "keys_file" (printf "/etc/headwater-keys/%s" .Values.gateway.apiKeys.key) }}{{ end -}}
{{- if .Values.gateway.tls.existingSecret -}}
{{- $_ := set $gateway "tls_certificate" "/etc/headwater-tls/tls.crt" -}}
{{- $_ := set $gateway "tls_key" "/etc/headwater-tls/tls.key" -}}
{{- end -}}
{{- if .Values.gateway.batches.existingClaim }}{{ $_ := set $gateway "batch_path" "/var/lib/headwater/batches" }}{{ end -}}
{{- $_ := set $own "gateway" $gateway -}}
{{- $transfer := dict -}}
{{- with .Values.kvTransfer.interface }}{{ $_ := set $transfer "interface" . }}{{ end -}}
{{- with .Values.kvTransfer.ports }}{{ $_ := set $transfer "ports" . }}{{ end -}}
{{- with .Values.kvTransfer.ucx }}{{ $_ := set $transfer "ucx" . }}{{ end -}}
{{- with $transfer }}{{ $_ := set $own "transfer" . }}{{ end -}}
{{- $tiers := dict -}}
{{- if ne (toString .Values.tiers.host) "0" }}{{ $_ := set $tiers "host" .Values.tiers.host }}{{ end -}}
{{- if ne (toString .Values.tiers.disk) "0" }}{{ $tiers = merge $tiers (dict "disk" .Values.tiers.disk "disk_path" "/var/lib/headwater/blocks") }}{{ end -}}
{{- with $tiers }}{{ $_ := set $own "tiers" . }}{{ end -}}
{{- $worker := dict "drain_s" (int .Values.workerDefaults.drainSeconds) -}}
{{- with include "headwater.threads" . }}{{ $_ := set $worker "threads" (int .) }}{{ end -}}
{{- $_ := set $own "worker" $worker -}}
{{- $_ := set $own "telemetry" (dict "metrics_port" (int .Values.monitoring.workerPort)) -}}
{{- $all := mustMergeOverwrite $own (deepCopy .Values.config) -}}
{{- range $section, $settings := $all -}}
{{- range $key, $value := $settings -}}
{{- /* Helm holds numbers as floats, and would write 16777216 as 1.6777216e+07. */ -}}
{{- if kindIs "float64" $value }}{{ if eq (floor $value) $value }}{{ $_ := set $settings $key (int64 $value) }}{{ end }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{- /* Threads of a worker on CPUs: those of its limit, as a process sees all cores of its machine, limit or not. */ -}}
{{- define "headwater.threads" -}}
{{- $least := 0 -}}
{{- range include "headwater.groups" . | fromYaml -}}
{{- if not .gpu -}}
{{- with (default (dict) .resources.limits).cpu -}}
{{- $cores := include "headwater.cores" . | int -}}
{{- $least = ternary $cores (min $least $cores) (eq $least 0) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $least }}{{ $least }}{{ end -}}
{{- end -}}

{{- define "headwater.cores" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text -}}
{{- max 1 (div (trimSuffix "m" $text | int) 1000) -}}
{{- else -}}
{{- max 1 (floor (float64 $text) | int) -}}
{{- end -}}
{{- end -}}
