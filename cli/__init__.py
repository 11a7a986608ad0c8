"""`upbeat`: starts a stack of services as processes, asks a running one, and checks a machine. Imports no service."""
