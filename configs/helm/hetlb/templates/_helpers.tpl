{{- define "hetlb.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "hetlb.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "hetlb.labels" -}}
{{ include "hetlb.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "hetlb.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "hetlb.name" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "hetlb.rbac" -}}
{{- if or .Values.rbac.create .Values.gateway.enabled -}}true{{- end -}}
{{- end -}}

{{- define "hetlb.grace" -}}
{{- dig "proxy" "shutdown_grace_s" 120 .Values.fleet | float64 | ceil | int -}}
{{- end -}}

{{- /* Keys of the fleet file that only a restart changes (hetlb says the same at a reload): pods roll with them. */ -}}
{{- define "hetlb.restart" -}}
{{- $fleet := .Values.fleet -}}
{{- $keys := pick $fleet "queue" "health" "scrape" "tracing" "discovery" "watch" "pick" "shared" -}}
{{- $_ := set $keys "proxy" (pick (default dict $fleet.proxy) "workers" "request_log" "request_log_format") -}}
{{- $_ := set $keys "policy" (omit (default dict $fleet.policy) "name") -}}
{{- range $fleet.models -}}
{{- if .tokenizer -}}{{- $_ := set $keys (print "tokenizer of " .name) .tokenizer -}}{{- end -}}
{{- end -}}
{{- $keys | toJson | sha256sum -}}
{{- end -}}
