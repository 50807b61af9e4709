from .errors import MpiparError as MpiparError
