"""The word sets that instructions are filled from.

Invariant: every level-1 slot word is a single token of the shipped tokenizer, with and without a leading space, so that
a very small model can solve a task by copying one token per slot. Changing a set means building the tokenizer again.
"""

from __future__ import annotations

#: Stems of CSV files.
TABLES = ("sales", "orders", "stock", "trips", "items", "visits", "bills", "loans")
#: Numeric columns of a level-1 table -> position counted from 1, the same in every table.
COLUMNS = {"price": 3, "units": 4, "cost": 5, "tax": 6, "rating": 7, "weight": 8}
#: Values of the text columns at levels 2 and 3.
REGIONS = ("north", "south", "east", "west")
STATUSES = ("paid", "open", "cancelled")
CHANNELS = ("web", "phone", "shop")
GOODS = ("lamp", "chair", "desk", "shelf", "sofa")
TOPICS = ("home", "work", "travel", "music")

#: Stems of log files, log levels, and the services that write at levels 2 and 3.
LOGS = ("app", "web", "mail", "auth", "cron", "proxy", "queue", "disk")
LOG_LEVELS = ("ERROR", "WARN", "INFO", "DEBUG", "FATAL")
SERVICES = ("billing", "search", "login", "upload", "export", "sync")

#: Stems of configuration files, their keys and values.
CONFIGS = ("server", "client", "cache", "worker", "gateway", "main")
KEYS = ("mode", "theme", "format", "region", "policy", "driver")
VALUES = ("fast", "slow", "dark", "light", "local", "remote", "auto", "strict")
SECTIONS = ("network", "storage", "display", "security")

#: File extensions and folder names.
EXTENSIONS = ("txt", "md", "png", "jpg", "csv", "log", "py", "json")
FOLDERS = ("images", "docs", "data", "archive", "saved", "reports", "source", "misc")
PREFIXES = ("draft", "trip", "scan", "copy", "photo", "week")

#: Stems of shell scripts, and the wrong file stems that failing ones read.
SCRIPTS = ("report", "summary", "check", "daily", "build", "total")
WRONG_STEMS = ("input", "raw", "file", "table")

#: Stems of text files, and the words counted in them.
TEXTS = ("notes", "story", "letter", "diary", "poem", "draft", "memo", "essay")
COUNTED = ("apple", "river", "stone", "cloud", "tiger", "lemon", "piano", "candle")

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
