"""Tools of servers of the Model Context Protocol.

keys      what a recipe says of servers
files     files that name servers, of several clients
servers   servers: started, asked, started again
tools     their tools
"""
