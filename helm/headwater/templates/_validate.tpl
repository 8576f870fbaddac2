{{- /* What the schema cannot say: values that do not fit each other. Every message names the value to change. */ -}}
{{- define "headwater.validate" -}}
{{- include "headwater.validateGroups" . -}}
{{- include "headwater.validateConfig" . -}}
{{- include "headwater.validateTransfer" . -}}
{{- include "headwater.validateStorage" . -}}
{{- include "headwater.validateAccess" . -}}
{{- end -}}

{{- define "headwater.validateGroups" -}}
{{- $count := dict "prefill" 0 "decode" 0 "both" 0 -}}
{{- $gpus := dict -}}
{{- include "headwater.validateGroup" (dict "root" . "path" "gateway" "group" .Values.gateway) -}}
{{- include "headwater.validateMemory" (dict "path" "head" "group" .Values.head "need" (list .Values.head.shmSize)) -}}
{{- include "headwater.validateMemory" (dict "path" "gateway" "group" .Values.gateway "need" (list .Values.gateway.shmSize)) -}}
{{- range $name, $group := include "headwater.groups" . | fromYaml -}}
{{- $path := printf "workers.%s" $name -}}
{{- if has $name (list "gateway" "head") }}{{ fail (printf "%s: this name is taken by the chart; choose another one" $path) }}{{ end -}}
{{- if not (has $group.role (list "prefill" "decode" "both")) }}{{ fail (printf "%s.role: must be prefill, decode or both" $path) }}{{ end -}}
{{- include "headwater.validateGroup" (dict "root" $ "path" $path "group" $group) -}}
{{- $_ := set $count $group.role (add (get $count $group.role) (int $group.replicas)) -}}
{{- $gpu := int $group.gpu -}}
{{- if and (hasKey $gpus $group.role) (ne (get $gpus $group.role) $gpu) }}{{ fail (printf "%s.gpu: is %d, and another group of role %s has %d; groups of a role need the same" $path $gpu $group.role (get $gpus $group.role)) }}{{ end -}}
{{- $_ := set $gpus $group.role $gpu -}}
{{- $need := list $group.shmSize $.Values.tiers.host -}}
{{- if not $gpu }}{{ $need = append $need (dig "worker" "kv_memory" "1GiB" $.Values.config) }}{{ end -}}
{{- include "headwater.validateMemory" (dict "path" $path "group" $group "need" $need) -}}
{{- end -}}
{{- if ne (eq (get $count "prefill") 0) (eq (get $count "decode") 0) }}{{ fail "workers: prefill and decode workers only work together: groups of both roles need replicas" }}{{ end -}}
{{- if eq (add (get $count "prefill") (get $count "both")) 0 }}{{ fail "workers: no group has replicas: nobody would answer" }}{{ end -}}
{{- end -}}

{{- define "headwater.validateGroup" -}}
{{- $replicas := int .group.replicas -}}
{{- $min := ternary $replicas (int .group.min) (kindIs "invalid" .group.min) -}}
{{- $max := ternary $replicas (int .group.max) (kindIs "invalid" .group.max) -}}
{{- if gt $min $replicas }}{{ fail (printf "%s.min: %d is more than %s.replicas (%d)" .path $min .path $replicas) }}{{ end -}}
{{- if lt $max $replicas }}{{ fail (printf "%s.max: %d is less than %s.replicas (%d)" .path $max .path $replicas) }}{{ end -}}
{{- if and (ne $min $max) (not .root.Values.ray.autoscaler.enabled) }}{{ fail (printf "%s.min, %s.max: have no effect without ray.autoscaler.enabled" .path .path) }}{{ end -}}
{{- range $kind, $resources := .group.resources -}}
{{- range $name, $_ := $resources -}}
{{- if hasPrefix "nvidia.com/" $name }}{{ fail (printf "%s.resources.%s: set %s.gpu instead of %s" $.path $kind $.path $name) }}{{ end -}}
{{- if eq $name $.root.Values.kvTransfer.rdma.resource }}{{ fail (printf "%s.resources.%s: set kvTransfer.rdma instead of %s" $.path $kind $name) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* What is in memory whatever the process does: shared memory, host tier, and on CPUs the KV pool. */ -}}
{{- define "headwater.validateMemory" -}}
{{- if lt (include "headwater.bytes" .group.shmSize | int64) 134217728 }}{{ fail (printf "%s.shmSize: %s is too small: Ray's object store takes 100 MiB of it; 128Mi is the least" .path .group.shmSize) }}{{ end -}}
{{- with (default (dict) .group.resources.limits).memory -}}
{{- $sum := 0 -}}
{{- range $.need }}{{ $sum = add $sum (include "headwater.bytes" . | int64) }}{{ end -}}
{{- if ge $sum (include "headwater.bytes" . | int64) }}{{ fail (printf "%s.resources.limits.memory: %s does not hold shmSize, tiers.host and (on CPUs) config.worker.kv_memory, which together are %d MiB" $.path . (div $sum 1048576)) }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "headwater.validateConfig" -}}
{{- range .Values.env -}}
{{- if hasPrefix "HEADWATER__" .name }}{{ fail (printf "env: %s would override the configuration file behind the chart's back; set it under config" .name) }}{{ end -}}
{{- if has .name (list "POD_IP" "HOME" "HEADWATER_CACHE" "HF_HOME" "HF_TOKEN" "RAY_AUTH_MODE" "RAY_AUTH_TOKEN") }}{{ fail (printf "env: %s is set by the chart" .name) }}{{ end -}}
{{- end -}}
{{- $own := dict "model" (dict "name" "model.name") -}}
{{- range list "prefill" "decode" "both" }}{{ $_ := set $own . (dict "replicas" "workers" "resources" "workers") }}{{ end -}}
{{- $_ := set $own "gateway" (dict "replicas" "gateway.replicas" "same_port" "nothing: each gateway has an address of its own" "host" "nothing: gateways listen on all addresses of their pod" "port" "gateway.port" "drain_s" "gateway.drainSeconds" "resources" "gateway" "keys_file" "gateway.apiKeys" "api_keys" "gateway.apiKeys" "tls_certificate" "gateway.tls" "tls_key" "gateway.tls" "batch_path" "gateway.batches.existingClaim") -}}
{{- $_ := set $own "worker" (dict "drain_s" "workerDefaults.drainSeconds") -}}
{{- $_ := set $own "gossip" (dict "key" "gossip.existingSecret" "host" "nothing: nodes announce the address of their pod") -}}
{{- $_ := set $own "transfer" (dict "interface" "kvTransfer.interface" "ports" "kvTransfer.ports" "ucx" "kvTransfer.ucx") -}}
{{- $_ := set $own "tiers" (dict "host" "tiers.host" "disk" "tiers.disk" "disk_path" "tiers.disk") -}}
{{- $_ := set $own "telemetry" (dict "metrics_port" "monitoring.workerPort" "metrics_host" "nothing: workers listen on the address of their pod") -}}
{{- range $section, $settings := .Values.config -}}
{{- range $key, $_ := $settings -}}
{{- with dig $section $key "" $own }}{{ fail (printf "config.%s.%s: the chart sets it; use %s" $section $key .) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "headwater.validateTransfer" -}}
{{- $rdma := .Values.kvTransfer.rdma -}}
{{- if and $rdma.enabled (not $rdma.memlock) -}}
{{- fail "kvTransfer.rdma.memlock: is not set. RDMA devices need locked memory, and the capability IPC_LOCK does nothing for a user who is not root: say `node` where the nodes' container runtime raises the limit (memlock) for all containers, or `root` to run workers as root with IPC_LOCK. Otherwise blocks would travel over TCP, or workers would not start" -}}
{{- end -}}
{{- if and $rdma.memlock (not $rdma.enabled) }}{{ fail "kvTransfer.rdma.memlock: has no effect without kvTransfer.rdma.enabled" }}{{ end -}}
{{- $gpu := false -}}
{{- range include "headwater.groups" . | fromYaml }}{{ if .gpu }}{{ $gpu = true }}{{ end }}{{ end -}}
{{- with .Values.kvTransfer.ucx.TLS -}}
{{- if and $gpu (not (regexMatch "^(\\^.*|.*\\b(all|cuda|cuda_copy|cuda_ipc)\\b.*)$" .)) }}{{ fail (printf "kvTransfer.ucx.TLS: %s has neither cuda_copy nor cuda_ipc, without which nothing reads a GPU's memory" .) }}{{ end -}}
{{- end -}}
{{- range $key, $setting := dict "NET_DEVICES" "interface" "TCP_PORT_RANGE" "ports" -}}
{{- if and (hasKey $.Values.kvTransfer.ucx $key) (get $.Values.kvTransfer $setting) }}{{ fail (printf "kvTransfer.ucx.%s: is already what kvTransfer.%s sets" $key $setting) }}{{ end -}}
{{- end -}}
{{- if .Values.kvTransfer.ports -}}
{{- $ends := splitList "-" .Values.kvTransfer.ports -}}
{{- if ge (first $ends | int) (last $ends | int) }}{{ fail (printf "kvTransfer.ports: %s must go from a lower to a higher port" .Values.kvTransfer.ports) }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "headwater.validateStorage" -}}
{{- $cache := .Values.model.cache -}}
{{- if not (or $cache.size $cache.existingClaim (hasPrefix "/" .Values.model.name)) }}{{ fail (printf "model.cache: is not set, and the head node downloads model.name (%s) for all pods: they need a claim that all of them mount (model.cache.existingClaim or model.cache.size)" .Values.model.name) }}{{ end -}}
{{- if and $cache.size $cache.existingClaim }}{{ fail "model.cache.size: has no effect with model.cache.existingClaim" }}{{ end -}}
{{- if and (or $cache.size $cache.existingClaim) (eq $cache.accessMode "ReadWriteOnce") }}{{ fail "model.cache.accessMode: ReadWriteOnce is for the pods of one node, and head, gateways and workers all mount the cache; use ReadWriteMany" }}{{ end -}}
{{- $host := include "headwater.bytes" .Values.tiers.host | int64 -}}
{{- $disk := include "headwater.bytes" .Values.tiers.disk | int64 -}}
{{- if and $disk (not $host) }}{{ fail "tiers.host: is 0, and tiers.disk is set: blocks go to disk through host memory" }}{{ end -}}
{{- if and (not $disk) (or .Values.tiers.existingClaim .Values.tiers.storageClass) }}{{ fail "tiers.disk: is 0, so tiers.existingClaim and tiers.storageClass have no effect" }}{{ end -}}
{{- if and .Values.tiers.existingClaim .Values.tiers.storageClass }}{{ fail "tiers.storageClass: has no effect with tiers.existingClaim" }}{{ end -}}
{{- if .Values.batch.enabled -}}
{{- range list "input" "output" "existingClaim" }}{{ if not (get $.Values.batch .) }}{{ fail (printf "batch.%s: is not set, and batch.enabled is true" .) }}{{ end }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "headwater.validateAccess" -}}
{{- $ft := .Values.ray.gcsFaultTolerance -}}
{{- if and $ft.enabled (not $ft.redisAddress) }}{{ fail "ray.gcsFaultTolerance.redisAddress: is not set; the state of the head node is kept in a Redis of yours, such as redis:6379" }}{{ end -}}
{{- if and $ft.enabled (not .Values.gossip.existingSecret) }}{{ fail "gossip.existingSecret: is not set, and ray.gcsFaultTolerance is enabled: what survives the head node needs a key that does, too" }}{{ end -}}
{{- if and .Values.gateway.ingress.enabled (not .Values.gateway.ingress.host) }}{{ fail "gateway.ingress.host: is not set, and gateway.ingress.enabled is true" }}{{ end -}}
{{- if and .Values.gateway.httpRoute.enabled (not .Values.gateway.httpRoute.parentRefs) }}{{ fail "gateway.httpRoute.parentRefs: names no Gateway, and gateway.httpRoute.enabled is true" }}{{ end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.egress) -}}
{{- if .Values.ray.autoscaler.enabled }}{{ fail "networkPolicy.egress: is empty, and Ray's autoscaler needs the API server: add a rule for it" }}{{ end -}}
{{- if $ft.enabled }}{{ fail "networkPolicy.egress: is empty, and the head node needs its Redis (ray.gcsFaultTolerance.redisAddress): add a rule for it" }}{{ end -}}
{{- end -}}
{{- end -}}
