"""GGUF files, the weights of llama.cpp. Read files.py first: it reads and writes them by means of the others."""
