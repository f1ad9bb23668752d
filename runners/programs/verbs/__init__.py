"""The verbs of programs and configurations, a file each."""
