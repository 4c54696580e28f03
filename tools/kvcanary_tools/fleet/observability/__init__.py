"""Dashboards of Grafana, alert rules of Prometheus, and a compose file that starts both."""
