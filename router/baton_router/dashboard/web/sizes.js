// Numbers in readable units.

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0 ms";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.9995) return `${Number((value * 1000).toPrecision(value < 0.01 ? 2 : 3))} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const whole = Math.round(value);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (value > 0 && value < 0.1) return String(Number(value.toPrecision(1)));
  return value < 10 && !Number.isInteger(value) ? value.toFixed(1) : String(Math.round(value));
}

export function share(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–";
}

export function counted(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

export function shortened(text, most) {
  const letters = [...text];
  return letters.length <= most ? text : `${letters.slice(0, most - 1).join("")}…`;
}
