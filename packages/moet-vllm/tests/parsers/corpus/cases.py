"""The whole corpus."""

from parsers.corpus.case import Case
from parsers.corpus.hard import hard_cases
from parsers.corpus.table import sound_cases

CASES: tuple[Case, ...] = (*sound_cases(), *hard_cases())
