"""The word sets that instructions are filled from.

Invariant: every level-1 slot word is a single token of the shipped tokenizer, with and without a leading space, so that
a very small model can solve a task by copying one token per slot. Changing a set means building the tokenizer again.
"""

from __future__ import annotations

#: Stems of files of every kind. One set for all families: a policy has to copy a name, not to know it.
NAMES = (
    "sales", "orders", "stock", "trips", "items", "visits", "server", "client", "cache", "mail", "queue", "backup",
)  # fmt: skip
TABLES = LOGS = CONFIGS = SCRIPTS = TEXTS = NAMES

#: Numeric columns of a level-1 table -> position counted from 1, the same in every table.
COLUMNS = {"price": 3, "units": 4, "cost": 5, "tax": 6, "rating": 7, "weight": 8}
#: Values of the text columns at levels 2 and 3.
REGIONS = ("north", "south", "east", "west")
STATUSES = ("paid", "open", "cancelled")
CHANNELS = ("web", "phone", "shop")
GOODS = ("lamp", "chair", "desk", "shelf", "sofa")
TOPICS = ("home", "work", "travel", "music")

#: Log levels, and the services that write at levels 2 and 3.
LOG_LEVELS = ("ERROR", "WARN", "INFO", "DEBUG", "FATAL", "TRACE")
SERVICES = ("billing", "search", "login", "upload", "export", "sync")

#: Keys and values of configuration files.
KEYS = ("mode", "theme", "format", "region", "policy", "driver")
VALUES = ("fast", "slow", "dark", "light", "local", "remote", "auto", "strict")
SECTIONS = ("network", "storage", "display", "security")

#: File extensions and folder names.
EXTENSIONS = ("txt", "md", "png", "jpg", "csv", "log", "py", "json", "html", "xml")
FOLDERS = ("images", "docs", "data", "archive", "saved", "reports", "source", "misc", "media", "old")
PREFIXES = ("draft", "trip", "scan", "copy", "photo", "week")

#: The wrong file stems that failing scripts read.
WRONG_STEMS = ("input", "raw", "file", "table")

#: Words counted in text files.
COUNTED = ("apple", "river", "stone", "cloud", "tiger", "lemon", "piano", "candle", "forest", "silver")

#: Stems of files that are only there to be moved, renamed or left alone.
STEMS = (
    "agenda", "budget", "intro", "garden", "invoice", "ledger", "meeting", "outline", "plan", "recipe",
    "review", "roster", "sketch", "survey", "team", "venue", "winter", "yard",
)  # fmt: skip

#: Vocabulary of filler prose; it shares no substring with COUNTED.
FILLER = (
    "the", "a", "we", "they", "walked", "to", "market", "and", "found", "some", "bread", "under", "old", "bridge",
    "while", "rain", "kept", "falling", "on", "quiet", "street", "near", "harbour", "before", "dinner", "with",
    "friends", "who", "told", "long", "jokes", "about", "summer",
)  # fmt: skip

#: Messages of log lines; none holds the name of a log level or of a service.
LOG_MESSAGES = (
    "request took 120 ms", "connection reset by peer", "token expired for user 17", "retrying in 5 s",
    "configuration loaded", "disk usage at 81 percent", "session closed", "job 42 finished", "timeout after 30 s",
    "checksum mismatch in block 9", "worker started", "rate limit reached",
)  # fmt: skip
