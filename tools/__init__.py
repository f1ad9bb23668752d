"""User interfaces: the command line, reports and dashboard, the model server, launches."""
