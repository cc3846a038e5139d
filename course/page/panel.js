// The bill's panel: choices, the table, and the options that do the same elsewhere.

"use strict";

const charged = JSON.parse(carried("charged")); // {models, devices, flags, recipes, left, notes, most} (recipes.py)
const OURS = { ...told.bill, budget: "20", price: "" }; // the bill of the course (build.py)

/** Three digits: 0.0123, 1.23, 12.3, 123, 1,234; 1.2e+7 from there on. */
function digits(value) {
  if (value >= 1e7) return value.toPrecision(2);
  if (value >= 99.95) return Math.round(value).toLocaleString("en");
  return value >= 9.995 ? value.toFixed(1) : value >= 0.0995 ? value.toFixed(2) : String(Number(value.toPrecision(2)));
}

/** Bytes in decimal units. */
function decimal(value) {
  for (const [unit, least] of [["EB", 1e18], ["PB", 1e15], ["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= 0.9995 * least) return `${digits(value / least)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

const duration = (seconds) => (seconds >= 1 ? `${digits(seconds)} s` : `${digits(seconds * 1e3)} ms`);

function cell(kind, text, scope) {
  const element = document.createElement(kind);
  element.textContent = text;
  if (scope) element.scope = scope;
  return element;
}

function row(...cells) {
  const element = document.createElement("tr");
  element.append(...cells);
  return element;
}

/** given: choices that are not as in OURS; chosen(given): the reader has made others. */
class Panel {
  constructor(given, chosen) {
    const find = (name) => document.getElementById(`bill-${name}`);
    this.parts = Object.fromEntries(["model", "device", "context", "users", "budget", "price", "said", "rows", "head", "left"].map((name) => [name, find(name)]));
    const { parts } = this;
    parts.model.append(...Object.keys(charged.models).map((name) => new Option(name)));
    parts.device.append(...Object.keys(charged.devices).map((name) => new Option(name)));
    for (const name of Object.keys(OURS)) {
      parts[name].addEventListener("input", () => {
        this.draw();
        chosen(Object.fromEntries(Object.keys(OURS).map((key) => [key, parts[key].value]).filter(([key, value]) => value !== OURS[key])));
      });
    }
    find("notes").append(...charged.notes.map((note) => cell("li", note)));
    this.flags(find("flags"));
    this.show(given);
  }

  /** Make these choices; what nobody knows is as in OURS. */
  show(given) {
    for (const [name, ours] of Object.entries(OURS)) {
      const part = this.parts[name], value = given[name] ?? ours;
      part.value = value;
      if (part.value !== value) part.value = ours;
    }
    this.draw();
  }

  /** What is wrong with the choices, or null. */
  wrong(name, model, deviceName, device, context, users, percent, price) {
    const { most } = charged, whole = (value, limit) => Number.isInteger(value) && value >= 1 && value <= limit;
    const upTo = (limit) => limit.toLocaleString("en");
    if (!whole(context, most.context)) return `Context: expected a whole number of tokens from 1 to ${upTo(most.context)}.`;
    if (!whole(users, most.users)) return `Users: expected a whole number from 1 to ${upTo(most.users)}.`;
    if (!(percent > 0 && percent <= 100)) return "Budget: expected a percentage above 0, at most 100.";
    if (!(price >= 0 && price <= most.price)) return `Price: expected an amount per hour from 0 to ${upTo(most.price)}.`;
    if (model.context !== null && context > model.context) return `${name} was trained for ${model.context.toLocaleString("en")} tokens.`;
    const size = weightBytes(model);
    if (size > device.memory) return `The weights of ${name} take ${decimal(size)} and ${deviceName} has ${decimal(device.memory)}: choose a larger device or a smaller model.`;
    return null;
  }

  draw() {
    const { parts } = this, name = parts.model.value, deviceName = parts.device.value;
    const model = charged.models[name], device = charged.devices[deviceName];
    const [context, users] = [Number(parts.context.value), Number(parts.users.value)];
    const priced = parts.price.value !== "", price = Number(parts.price.value), percent = Number(parts.budget.value);
    const wrong = this.wrong(name, model, deviceName, device, context, users, percent, price);
    for (const part of [parts.rows, parts.head, parts.left]) part.replaceChildren();
    if (wrong) {
      parts.said.textContent = wrong;
      return;
    }
    this.leftOut(name, deviceName, context, users);
    const weights = weightBytes(model);
    const prefill = prefillSeconds(model, device, context), perMillion = (price * prefill) / 3600 * 1e6 / context;
    parts.said.textContent = `Weights: ${decimal(weights)} of ${decimal(device.memory)}; ${decimal(device.memory - weights)} are left for caches. `
      + `Reading one user's context takes at least ${duration(prefill)}${priced ? `, ${digits(perMillion)} per million tokens` : ""}.`;
    const heads = ["method", "cache on device", "cache on host", "users fit", "tokens fit", "ms per token", ...(priced ? ["cost per 1M tokens"] : []), "first to run out"];
    parts.head.replaceChildren(row(...heads.map((text) => cell("th", text, "col"))));
    for (const [name, recipe] of Object.entries(charged.recipes)) {
      const line = billLine(withBudget(recipe, percent / 100), model, device, context, users);
      const count = (n) => (n === null ? "any" : n.toLocaleString("en")), method = recipe.budget === null ? name : `${name}, ${percent} %`;
      if (line.refused) {
        const reason = cell("td", `not on this model: ${line.refused}`);
        reason.colSpan = heads.length - 1;
        parts.rows.append(row(cell("th", method, "row"), reason));
        continue;
      }
      const cost = line.seconds === null ? "–" : digits(((price * line.seconds) / 3600) * 1e6 / line.served);
      const cells = [decimal(line.device), line.host ? decimal(line.host) : "–", count(line.users), count(line.tokens),
        line.seconds === null ? "–" : digits(line.seconds * 1e3), ...(priced ? [cost] : []), line.first];
      parts.rows.append(row(cell("th", method, "row"), ...cells.map((text) => cell("td", text))));
    }
  }

  /** What this page cannot reckon, and who can. */
  leftOut(model, device, context, users) {
    const names = Object.keys(charged.left);
    if (!names.length) return;
    const said = names.map((name) => `${name} (${charged.left[name]})`).join(", ");
    const asking = `kvlab bill --model ${model} --device "${device}" --context ${context} --users ${users} --methods ${names.join(" ")}`;
    this.parts.left.append(`Left out on this page: ${said}. `, "Ask for it: ", cell("code", asking));
  }

  /** The options that do the same in the engines that people use. */
  flags(table) {
    const { engines, techniques, read } = charged.flags, names = Object.keys(engines);
    table.caption.textContent = `The same elsewhere: ${names.map((name) => `${name} ${engines[name].version}`).join(", ")}; read on ${read}.`;
    table.tHead.append(row(cell("th", "technique", "col"), ...names.map((name) => cell("th", name, "col"))));
    for (const { name, methods, options } of techniques) {
      const found = names.map((engine) => {
        const element = cell("td", ""), option = options[engine];
        if (!option) element.textContent = "not there";
        else element.append(cell("code", option.option), option.note ? `; ${option.note}` : "");
        return element;
      });
      table.tBodies[0].append(row(cell("th", `${name} (${methods.join(", ")})`, "row"), ...found));
    }
  }
}
