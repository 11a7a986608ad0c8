{{/* Names, labels, images, and what several templates derive from the values. */}}

{{- define "upbeat.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- (ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name)) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels by which services, policies and monitors find the pods of a component. Of: root, component. */}}
{{- define "upbeat.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "upbeat.labels" -}}
{{ include "upbeat.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* An image's reference. Of: root, image (a value), key (its name). */}}
{{- define "upbeat.image" -}}
{{- $repository := required (printf "%s.repository: there is no published image; build deploy/Dockerfile, push it, and name it here" .key) .image.repository -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The pools as YAML, each with `first` (number of its first node), `models` (names) and `engine`. */}}
{{- define "upbeat.pools" -}}
{{- $root := . -}}
{{- $first := 0 -}}
{{- $pools := list -}}
{{- $names := list -}}
{{- range .Values.nodes.pools -}}
{{- $pool := . -}}
{{- if has .name $names -}}{{- fail (printf "nodes.pools: %s is there twice; give each pool a name of its own" .name) -}}{{- end -}}
{{- $names = append $names .name -}}
{{- $models := default (keys $root.Values.models | sortAlpha) .models -}}
{{- $engine := "" -}}
{{- range $models -}}
{{- if not (hasKey $root.Values.models .) -}}{{- fail (printf "nodes.pools[%s].models: %s is not in models; add it there" $pool.name .) -}}{{- end -}}
{{- $its := default "native" (get $root.Values.models .).engine -}}
{{- if and $engine (ne $engine $its) -}}{{- fail (printf "nodes.pools[%s].models: %s run in native and vllm; give each engine a pool of its own" $pool.name (join ", " $models)) -}}{{- end -}}
{{- $engine = $its -}}
{{- end -}}
{{- $pools = append $pools (merge (dict "first" $first "models" $models "engine" (default "native" $engine)) (deepCopy .)) -}}
{{- $first = int (add $first .count) -}}
{{- end -}}
{{- dict "pools" $pools "count" $first | toYaml -}}
{{- end -}}

{{/* The configuration of all services. */}}
{{- define "upbeat.config" -}}
{{- $name := include "upbeat.fullname" . -}}
{{- $v := .Values -}}
{{- $fleet := include "upbeat.pools" . | fromYaml -}}
{{- $count := int $fleet.count -}}
{{- if gt $count 256 -}}{{- fail (printf "nodes.pools: %d nodes; a fleet has at most 256" $count) -}}{{- end -}}
{{- if and (gt $count 1) (not $v.blob.url) (not $v.blob.volume) -}}
{{- fail (printf "blob: %d nodes share one blob tier; set blob.url (s3://, gs://, az://) or blob.volume (a volume that all of them mount)" $count) -}}
{{- end -}}
{{- $bucket := or $v.blob.url $v.blob.volume -}}
{{- $addresses := list -}}
{{- range $n := until (int $v.scheduler.replicas) -}}
{{- $addresses = append $addresses (printf "%s-scheduler-%d.%s-schedulers:8081" $name $n $name) -}}
{{- end -}}
{{- $keys := list -}}
{{- range $i, $tenant := include "upbeat.tenants" . | fromYamlArray -}}
{{- $keys = append $keys (dict "key" (printf "sha256:%064d" $i) "tenant" $tenant) -}}
{{- end -}}
{{- $kv := dict "dram_gib" $v.nodes.dramGib "hbm_gib" $v.nodes.hbmGib -}}
{{- $size := $v.nodes.disk.sizeGib -}}
{{- if $bucket -}}
{{- $_ := set $kv "ssd_gib" (mulf $size 0.85) -}}
{{- $_ := set $kv "blob_url" (default "file:///blob" $v.blob.url) -}}
{{- else -}}
{{- $_ := set $kv "ssd_gib" (mulf $size 0.4) -}}
{{- $_ := set $kv "blob_gib" (mulf $size 0.4) -}}
{{- end -}}
{{- $gateway := dict "host" (trimAll "[]" $v.listenHost) "port" 8080 "api_keys" $keys -}}
{{- if $v.gateway.httpsSecret -}}{{- $_ := set $gateway "https" "/https" -}}{{- end -}}
{{- if or $v.gateway.autoscaling.enabled (gt (int $v.gateway.replicas) 1) -}}{{- $_ := set $gateway "responses_keep_s" 0 -}}{{- end -}}
{{- $said := dict
  "data" "/data" "shm_dir" "/shm" "run_dir" "/tmp/upbeat"
  "gateway" $gateway
  "scheduler" (dict "port" 8081 "addresses" $addresses "listen_host" $v.listenHost)
  "nodes" (dict "count" $count "devices" $v.nodes.devices "base_port" 8100 "same_ports" true
    "store_host" (printf "%s-node-{n}" $name) "worker_host" (printf "%s-node-{n}" $name)
    "listen_host" $v.listenHost "ucx_interface" $v.networkInterface)
  "kv" $kv
  "worker" (dict "images_gib" $v.nodes.imagesGib)
  "finetune" (dict "files_gib" 0)
  "tls" (dict "directory" "/certs" "automatic" false) -}}
{{- if $v.nodes.autoscaling.enabled -}}
{{- $_ := set $said "autoscale" (dict "min_nodes" $v.nodes.autoscaling.minNodes "max_nodes" $count) -}}
{{- end -}}
{{- if $v.models -}}
{{- $models := dict -}}
{{- range $model, $its := $v.models -}}
{{- $numbers := list -}}
{{- range $pool := $fleet.pools -}}
{{- if has $model $pool.models -}}
{{- range $n := until (int $pool.count) -}}{{- $numbers = append $numbers (int (add $pool.first $n)) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if not $numbers -}}{{- fail (printf "models.%s: no pool serves it; add it to models of one in nodes.pools" $model) -}}{{- end -}}
{{- $_ := set $models $model (merge (dict "nodes" $numbers) $its) -}}
{{- end -}}
{{- $_ := set $said "models" $models -}}
{{- else -}}
{{- $_ := set $said "model" "/opt/upbeat/models/demo" -}}
{{- end -}}
{{- mergeOverwrite $said (deepCopy $v.config) | toYaml -}}
{{- end -}}

{{/* The tenants that have keys, without the keys: also a node must know whether there are several. */}}
{{- define "upbeat.tenants" -}}
{{- $tenants := list -}}
{{- range .Values.gateway.apiKeys -}}{{- $tenants = append $tenants (default "default" .tenant) -}}{{- end -}}
{{- if .Values.gateway.existingSecret -}}{{- $tenants = default (list "default") .Values.gateway.tenants -}}{{- end -}}
{{- $tenants | uniq | toYaml -}}
{{- end -}}

{{- define "upbeat.clusterSecret" -}}
{{- default (printf "%s-cluster" (include "upbeat.fullname" .)) .Values.clusterSecret.existingSecret -}}
{{- end -}}

{{- define "upbeat.gatewaySecret" -}}
{{- default (printf "%s-gateway" (include "upbeat.fullname" .)) .Values.gateway.existingSecret -}}
{{- end -}}

{{/* The secret with the options of the bucket's client; empty: it needs none. */}}
{{- define "upbeat.blobSecret" -}}
{{- if .Values.blob.existingSecret -}}{{- .Values.blob.existingSecret -}}
{{- else if .Values.blob.options -}}{{- printf "%s-kvstore" (include "upbeat.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* What the secrets of certificates are called before the identity: -gateway, -scheduler, -operator, -node-0, ... */}}
{{- define "upbeat.tlsPrefix" -}}
{{- default (printf "%s-tls" (include "upbeat.fullname" .)) .Values.certificates.secretPrefix -}}
{{- end -}}

{{/* Identities of the fleet and their DNS names (contracts/identity.py), as YAML. */}}
{{- define "upbeat.identities" -}}
{{- $fleet := include "upbeat.pools" . | fromYaml -}}
gateway: gateway.upbeat.internal
scheduler: scheduler.upbeat.internal
operator: operator.upbeat.internal
{{- range $n := until (int $fleet.count) }}
node-{{ $n }}: node-{{ $n }}.node.upbeat.internal
{{- end -}}
{{- end -}}

{{/* GiB as a quantity in whole MiB. */}}
{{- define "upbeat.mib" -}}
{{- printf "%dMi" (int64 (ceil (mulf . 1024))) -}}
{{- end -}}
