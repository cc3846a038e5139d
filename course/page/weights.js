// The model's weights: int8 codes with one scale per row, as the page carries them.

"use strict";

/** base64 text of a gzip file -> its bytes. */
async function unpacked(text) {
  const letters = atob(text.trim()), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Weights {
  /** bytes: all tensors one after the other; tensors: {name: {kind: "int8" or "float", shape, at}}, where `at`
   * is a tensor's first byte; an int8 tensor's scales [rows] stand behind its codes [rows, cols]. */
  constructor(bytes, tensors, kernel) {
    const start = kernel.reserve(bytes.length);
    new Uint8Array(kernel.buffer, start, bytes.length).set(bytes);
    this.tensors = {};
    for (const [name, { kind, shape, at }] of Object.entries(tensors)) {
      const count = shape.reduce((a, b) => a * b, 1), [rows, cols] = shape;
      const float = (from, n) => new Float32Array(kernel.buffer, start + from, n);
      this.tensors[name] = kind === "float" ? float(at, count)
        : { codes: new Int8Array(kernel.buffer, start + at, count), scale: float(at + count, rows), rows, cols };
    }
  }

  get(name) {
    if (!(name in this.tensors)) throw new Error(`no tensor is called ${name}`);
    return this.tensors[name];
  }
}
