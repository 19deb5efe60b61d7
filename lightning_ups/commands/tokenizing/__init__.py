"""From files of documents to tokens: what the processes of ``tokenize`` do. Imports neither torch nor Lightning."""
