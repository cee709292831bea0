// The API key of this tab: kept while the tab is open, and sent to this server only.

const NAME = "baton.key";

export function key() {
  try {
    return sessionStorage.getItem(NAME) ?? "";
  } catch {
    return "";
  }
}

export function keep(value) {
  if (value) sessionStorage.setItem(NAME, value);
  else sessionStorage.removeItem(NAME);
}

export function authorization() {
  return key() ? { authorization: `Bearer ${key()}` } : {};
}
