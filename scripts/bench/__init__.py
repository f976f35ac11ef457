"""The benchmarks: each is a program that writes its results and its section of a page of docs/."""
