"""The page: the workshop model runs in the reader's browser, from one HTML file opened from disk.

`build.py` puts it together: the JavaScript files beside it in the order of `WORKER` and `PAGE`, the kernel
(`kernel.wat`, assembled by `assemble.py`), the model's weights as int8, its tokenizer, and InfiniGen's
skewing matrices. No JavaScript toolchain is needed, and the built page is committed nowhere.
"""
