// The worker: it holds the model, off the page's own thread, and answers messages.

"use strict";

const ROOM = 1024; // most tokens of a text, the answer included
let session = null;

const answers = {
  /** weights, skewing: base64 of gzip files; header: what build.py wrote beside them; kernel: bytes, or null for
   * plain JavaScript. */
  async load({ weights, skewing, header, kernel }) {
    const [bytes, turned] = await Promise.all([unpacked(weights), unpacked(skewing)]);
    const { config, tensors, tokenizer } = header;
    const machine = new Kernel(Engine.bytes(config, bytes.length, ROOM), kernel);
    const engine = new Engine(config, new Weights(bytes, tensors, machine), machine, ROOM);
    session = new Session(engine, new Tokenizer(tokenizer), new Float32Array(turned.buffer));
    return { simd: machine.simd };
  },
  run: (given) => session.run(given),
  reads: () => session.reads.size,
  words: ({ text }) => session.tokenizer.encode(text).map((id) => session.tokenizer.decode([id])),
  encode: ({ text }) => session.tokenizer.encode(text),
  decode: ({ ids }) => session.tokenizer.decode(ids),
};

onmessage = async ({ data: { number, what, given } }) => {
  try {
    const start = performance.now(), found = await answers[what](given);
    postMessage({ number, found, ms: performance.now() - start });
  } catch (error) {
    postMessage({ number, error: error.message });
  }
};
