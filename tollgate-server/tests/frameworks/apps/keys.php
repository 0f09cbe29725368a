<?php
// PHP's built-in server: `php -S 127.0.0.1:PORT keys.php`. Reports the values that a handler would count a client by.

// The usual way to read a token: https://stackoverflow.com/a/40582472
$authorization = $_SERVER['HTTP_AUTHORIZATION'] ?? '';
$token = preg_match('/Bearer\s(\S+)/i', $authorization, $found) ? $found[1] : null;
$login = isset($_SERVER['PHP_AUTH_USER']) ? $_SERVER['PHP_AUTH_USER'] . ':' . $_SERVER['PHP_AUTH_PW'] : null;
$first = fn($value) => is_array($value) ? reset($value) : $value;
header('Content-Type: application/json');
echo json_encode([
    'header' => $_SERVER['HTTP_X_API_KEY'] ?? null,
    'query' => $first($_GET['user_id'] ?? null),
    'cookie' => $first($_COOKIE['user_id'] ?? null),
    'token' => $token,
    'login' => $login,
], JSON_INVALID_UTF8_SUBSTITUTE);
