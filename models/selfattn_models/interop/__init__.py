"""Doors for texts: sentence-transformers' classes, scikit-learn, LangChain, BERTopic, Dask; each imports its library.

``selfattn.interop`` has the doors of attention, and other names of these.
"""
