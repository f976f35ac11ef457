"""Tools of servers of the Model Context Protocol, through the official SDK.

keys      recipe keys
servers   servers: read from a file, started, asked, and started again if they die
tools     tools of servers as tools of the trainer
"""
