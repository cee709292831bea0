"""
Every error that a client or an operator of Baton can meet: docs/reference/errors.md lists them.

Each class knows its HTTP status and its OpenAI type, code and param. So one function turns any error into a
response, and handlers do not mention statuses. Workers exchange `TransferFailed` and `IncompatiblePeer`; a
client sees them only when recovery was not allowed. `SetupError` ends a process at startup.

Each message is written here, once. The body is an error of OpenAI, with message, type, param and code
always present. The first paragraph of a class's docstring is the meaning, the rest is the remedy. The
reference of errors is generated from both.
"""

from baton_api.errors.base import *
from baton_api.errors.client_errors import *
from baton_api.errors.server_errors import *
