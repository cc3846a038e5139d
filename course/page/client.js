// The client: the page's side of the worker.

"use strict";

/** The contents of one of the page's data elements. */
const carried = (id) => document.getElementById(id).textContent;

class Client {
  constructor() {
    // A worker from a file is forbidden under file://; one from a blob is not.
    const source = new Blob([carried("worker-source")], { type: "text/javascript" });
    this.worker = new Worker(URL.createObjectURL(source));
    this.waiting = new Map();
    this.count = 0;
    this.worker.onmessage = ({ data }) => {
      const { resolve, reject } = this.waiting.get(data.number);
      this.waiting.delete(data.number);
      if (data.error !== undefined) reject(new Error(data.error));
      else resolve({ found: data.found, ms: data.ms });
    };
    this.worker.onerror = (event) => {
      for (const { reject } of this.waiting.values()) reject(new Error(event.message));
      this.waiting.clear();
    };
  }

  /** Ask the worker; resolves to {found, ms}. */
  ask(what, given) {
    const number = this.count++;
    return new Promise((resolve, reject) => {
      this.waiting.set(number, { resolve, reject });
      this.worker.postMessage({ number, what, given });
    });
  }

  /** Load the model; resolves to {found: {simd}, ms}. plain: without the WASM kernel. */
  load(plain = false) {
    const kernel = plain ? null : Uint8Array.from(atob(carried("kernel")), (letter) => letter.charCodeAt(0));
    const header = JSON.parse(carried("header"));
    return this.ask("load", { weights: carried("weights"), skewing: carried("skewing"), header, kernel });
  }
}
