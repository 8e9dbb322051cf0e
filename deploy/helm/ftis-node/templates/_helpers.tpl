{{- define "ftis-node.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- define "ftis-node.bootstrap" -}}
{{ include "ftis-node.fullname" . }}-bootstrap
{{- end }}

{{- define "ftis-node.labels" -}}
app.kubernetes.io/part-of: ftis-node
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "ftis-node.selector" -}}
app.kubernetes.io/name: ftis-node
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ftis-node.bootstrapSelector" -}}
app.kubernetes.io/name: ftis-bootstrap
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ftis-node.image" -}}
image: {{ .Values.image.repository }}:{{ .Values.image.tag | default (ternary "cuda" "cpu" (gt (int .Values.gpu.count) 0)) }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{- define "ftis-node.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "ftis-node.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "ftis-node.peers" -}}
{{- $peers := .Values.peers -}}
{{- if .Values.bootstrap.enabled -}}
{{- $id := required "bootstrap.peerId is empty: give the peer id of the key in the secret bootstrap.identitySecret" .Values.bootstrap.peerId -}}
{{- $peers = prepend $peers (printf "/dns4/%s.%s.svc/tcp/4001/p2p/%s" (include "ftis-node.bootstrap" .) .Release.Namespace $id) -}}
{{- end -}}
{{ required "peers is empty and bootstrap.enabled is false: give the addresses of a swarm in peers" (join "," $peers) }}
{{- end }}

{{/* The keys of a table as TOML, then its tables. Helm reads all numbers as floats; toJson writes whole ones without a point. */}}
{{- define "ftis-node.toml" -}}
{{- range $key, $value := .table }}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ toJson $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- range $key, $value := .table }}
{{- if kindIs "map" $value }}
{{- $path := append $.path (toJson $key) }}

[{{ join "." $path }}]
{{- include "ftis-node.toml" (dict "table" $value "path" $path) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "ftis-node.settings" -}}
{{- $settings := dict -}}
{{- with .Values.preset -}}
{{- $file := required (printf "preset %s: the chart has no such file" .) ($.Files.Get (printf "files/node/%s.toml" .)) -}}
{{- $settings = fromToml $file -}}
{{- end -}}
{{- $settings = mergeOverwrite $settings (deepCopy .Values.settings) -}}
{{- with $settings -}}
{{ include "ftis-node.toml" (dict "table" . "path" list) | trim }}
{{- end -}}
{{- end }}

{{- define "ftis-node.args" -}}
{{- if and .Values.run .Values.manifest }}{{ fail "run and manifest name two runs: give one of them" }}{{ end -}}
{{- if and .Values.model .Values.tinyModel }}{{ fail "model and tinyModel name two models: give one of them" }}{{ end -}}
- join
{{- with .Values.tinyModel }}
- --model=/var/cache/ftis-node/{{ . }}
{{- end }}
{{- range $option := list "model" "run" "task" "role" "follow" }}
{{- with index $.Values $option }}
- {{ printf "--%s=%s" $option . | quote }}
{{- end }}
{{- end }}
{{- if .Values.manifest }}
- --run=/etc/ftis-node/manifest.toml
{{- end }}
{{- if gt (int .Values.gpu.count) 1 }}
- --gpus={{ int .Values.gpu.count }}
{{- end }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "ftis-node.env" -}}
- name: FTIS_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: FTIS_PEERS
  valueFrom: {configMapKeyRef: {name: {{ include "ftis-node.fullname" . }}-peers, key: peers}}
# The token that /metrics requires. Probes need none.
- name: FTIS_OBSERVE__TOKEN_FILE
  value: /observe/token
{{- with .Values.service }}
{{- if .announceHost }}
{{- $port := int (required "service.announceHost needs service.libp2pNodePort" .libp2pNodePort) }}
{{- if or (mod $port 10) (gt (int $.Values.replicas) 10) }}
{{- fail "service.announceHost needs a libp2pNodePort that ends in 0, and at most 10 replicas: the pod's number is the last digit" }}
{{- end }}
- name: POD_NUMBER
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
- name: FTIS_ANNOUNCE
  value: '["/dns4/{{ .announceHost }}/tcp/{{ div $port 10 }}$(POD_NUMBER)"]'
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}
