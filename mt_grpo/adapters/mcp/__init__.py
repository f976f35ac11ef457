"""Tools of servers of the Model Context Protocol.

keys      what a recipe says of servers
servers   servers: started, asked, started again
tools     their tools
"""
