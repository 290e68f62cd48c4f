"""The plain index that the contract suites use as well."""

from kvframe.testing.trie import TrieIndex

__all__ = ["TrieIndex"]
