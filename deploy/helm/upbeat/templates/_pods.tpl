{{/* What every pod and container has, as hardened as those of compose.yaml. */}}

{{- define "upbeat.podSecurity" -}}
automountServiceAccountToken: false
# Variables of services would be named like settings.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "upbeat.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where pods run. Of: the values of a component, or of a pool over those of all nodes. */}}
{{- define "upbeat.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* A pod's metadata. Of: root, component, values. A change of the configuration starts pods again. */}}
{{- define "upbeat.podMetadata" -}}
annotations:
  checksum/config: {{ include "upbeat.config" .root | sha256sum }}
  {{- with .checksum }}
  checksum/secret: {{ . }}
  {{- end }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
labels:
  {{- include "upbeat.labels" . | nindent 2 }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "upbeat.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* /tmp and /cache, both in memory: what is compiled for this processor is run from /cache. */}}
{{- define "upbeat.scratchMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- end -}}

{{/* A health check of a gRPC service by its certificate. Of: port, who, flags, period, failures. The shell knows NODE. */}}
{{- define "upbeat.probe" -}}
exec:
  command: [sh, -c, 'exec upbeat probe {{ .flags }}{{ .address }} {{ .who }}']
timeoutSeconds: 10
periodSeconds: {{ .period }}
failureThreshold: {{ .failures }}
{{- end -}}

{{/* All three probes of a gRPC service. Rare: each starts Python. Of: address, who, startup (seconds). */}}
{{- define "upbeat.probes" -}}
startupProbe:
  {{- include "upbeat.probe" (dict "address" .address "who" .who "flags" "--alive " "period" 10 "failures" (div (add .startup 9) 10)) | nindent 2 }}
readinessProbe:
  {{- include "upbeat.probe" (dict "address" .address "who" .who "flags" "" "period" 30 "failures" 2) | nindent 2 }}
livenessProbe:
  {{- include "upbeat.probe" (dict "address" .address "who" .who "flags" "--alive " "period" 60 "failures" 3) | nindent 2 }}
{{- end -}}

{{/* What a worker, or a vLLM server, gets: a CPU engine has its device's memory here, and may fill the arena. Of: its
(values of the pool), vllm, gpus. */}}
{{- define "upbeat.workerResources" -}}
{{- $its := .its -}}
{{- $said := deepCopy $its.worker.resources -}}
{{- if not $said -}}
{{- $fixed := ternary (addf 8 $its.vllm.sharedMemoryGib) (addf 3 $its.imagesGib) .vllm -}}
{{- $most := include "upbeat.mib" (addf $fixed $its.hbmGib $its.dramGib) -}}
{{- $said = dict "requests" (dict "cpu" "2" "memory" $most) "limits" (dict "cpu" "4" "memory" $most) -}}
{{- end -}}
{{- if .gpus -}}
{{- $_ := set $said "limits" (merge (dict $its.gpuResource .gpus) (default dict $said.limits)) -}}
{{- end -}}
{{- toYaml $said -}}
{{- end -}}
