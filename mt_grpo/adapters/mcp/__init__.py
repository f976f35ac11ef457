"""Tools of servers of the Model Context Protocol.

servers   servers: started, asked, started again
tools     their tools
"""
