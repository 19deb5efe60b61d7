import sys

import nbformat as nbf

for cell in nbf.read(sys.argv[1], 4).cells:
    for out in cell.outputs:
        if out.output_type == "error":
            print("ERROR", out.ename, out.evalue)
        elif out.output_type == "stream":
            print(out.name + ":", out.text)
        else:
            print({kind: len(text) if kind != "text/plain" else text[:300] for kind, text in out.data.items()})
