"""What is looked at: dashboards, rules and alerts as code, from which the files of the chart are made."""
