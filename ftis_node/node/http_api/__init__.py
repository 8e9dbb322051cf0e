"""The local HTTP ports: status, metrics, health and the operator's actions."""
