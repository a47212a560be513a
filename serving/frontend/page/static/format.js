// Numbers with their units, as the page writes them. What is not there is an en dash.

export const NONE = "–";

const there = (value) => value !== null && value !== undefined && Number.isFinite(value);

const digits = (value) => String(value < 100 ? Number(value.toPrecision(3)) : Math.round(value));

export function seconds(value) {
  if (!there(value)) return NONE;
  return value < 1 ? `${digits(1000 * value)} ms` : `${digits(value)} s`;
}

export function percent(value) {
  return there(value) ? `${Math.round(value)} %` : NONE;
}

export function share(value) {
  return there(value) ? percent(100 * value) : NONE;
}

export function count(value) {
  if (!there(value)) return NONE;
  return Math.round(value).toLocaleString("en");
}

export function rate(value, unit = "") {
  if (!there(value)) return NONE;
  let text = value >= 10 || value === 0 ? count(value) : value.toFixed(1);
  if (value >= 10_000) text = `${(value / 1000).toFixed(value < 100_000 ? 1 : 0)}k`;
  return unit ? `${text} ${unit}` : text;
}

export function duration(total) {
  if (!there(total)) return NONE;
  const whole = Math.floor(total);
  const [days, hours, minutes] = [
    Math.floor(whole / 86400),
    Math.floor(whole / 3600) % 24,
    Math.floor(whole / 60) % 60,
  ];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

export function clock(unix) {
  return new Date(1000 * unix).toLocaleTimeString("en-GB");
}

export function fixed(value) {
  return there(value) ? value.toFixed(4) : NONE;
}
