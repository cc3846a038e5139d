// Matrix times tokens: the WASM SIMD kernel (kernel.wat), and the same in plain JavaScript.

"use strict";

const PAGE = 65536; // bytes of a page of WebAssembly memory

/** Memory for weights and activations, and who multiplies in it.
 *
 * bytes: how many. binary: the assembled kernel, or null for plain JavaScript, which is also what a browser
 * without WASM SIMD gets. `simd` says which it became. Addresses are in bytes. */
class Kernel {
  constructor(bytes, binary) {
    const pages = Math.ceil(bytes / PAGE);
    this.simd = binary !== null && typeof WebAssembly === "object" && WebAssembly.validate(binary);
    if (this.simd) {
      const memory = new WebAssembly.Memory({ initial: pages });
      this.exports = new WebAssembly.Instance(new WebAssembly.Module(binary), { page: { memory } }).exports;
      this.buffer = memory.buffer;
    } else {
      this.buffer = new ArrayBuffer(pages * PAGE);
    }
    this.next = 0;
  }

  /** The address of so many fresh bytes, on a boundary of 16. */
  reserve(bytes) {
    const at = this.next;
    this.next = Math.ceil((at + bytes) / 16) * 16;
    if (this.next > this.buffer.byteLength) throw new Error(`the kernel's memory is too small: ${this.next}`);
    return at;
  }

  /** A fresh Float32Array of so many numbers; its byteOffset is its address. */
  floats(count) {
    return new Float32Array(this.buffer, this.reserve(4 * count), count);
  }

  /** y [tokens, rows] = x [tokens, cols] times the matrix, transposed. */
  multiply(matrix, x, y, tokens) {
    const { codes, scale, rows, cols } = matrix;
    let done = 0;
    if (this.simd) {
      const at = [codes.byteOffset, scale.byteOffset];
      const where = () => [...at, x.byteOffset + 4 * done * cols, y.byteOffset + 4 * done * rows, rows, cols];
      for (; done + 4 <= tokens; done += 4) this.exports.times4(...where());
      for (; done < tokens; done++) this.exports.times1(...where());
    } else {
      for (; done < tokens; done++) times1(codes, scale, x, done * cols, y, done * rows, rows, cols);
    }
  }
}

/** One token, in plain JavaScript: y[yAt + row] = scale[row] * sum of codes[row, i] * x[xAt + i]. */
function times1(codes, scale, x, xAt, y, yAt, rows, cols) {
  for (let row = 0, w = 0; row < rows; row++) {
    let a = 0, b = 0, c = 0, d = 0;
    for (let i = xAt, end = xAt + cols; i < end; i += 4, w += 4) {
      a += codes[w] * x[i];
      b += codes[w + 1] * x[i + 1];
      c += codes[w + 2] * x[i + 2];
      d += codes[w + 3] * x[i + 3];
    }
    y[yAt + row] = (a + b + c + d) * scale[row];
  }
}
