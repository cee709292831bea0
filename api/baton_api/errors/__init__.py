"""
Every error that a client or an operator of Baton can meet.

* BatonError                    500
  + InvalidRequest              400
    + ContextTooLong            400
    + PromptTooLarge            400
    + PreviousResponseNotFound  400
  + Unauthorized                401
  + Forbidden                   403
  + ModelNotFound               404
  + AdapterNotFound             404
  + ResponseNotFound            404
  + FileNotFound                404
  + BatchNotFound               404
  + RouteNotFound               404
  + MethodNotAllowed            405
  + BatchEnded                  409
  + StaleLease                  409
  + BodyTooSlow                 408
  + BodyTooLarge                413
  + RangeNotSatisfiable         416
  + HeadTooLarge                431
  + QuotaExceeded               429
  + RateLimited                 429
  + RequestAborted              499
  + Overloaded                  503
  + NotInTime                   503
  + NotReady                    503
  + StorageUnavailable          503
  + StorageFull                 507
  + WorkerLost                  503
  + PoisonRequest               500
  + InternalError               500
  + ConstraintBroken            500
  + TransferFailed              503
  + IncompatiblePeer            503
  + SetupError                  500

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
